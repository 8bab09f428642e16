"""Training a detector: the whole of `train.py`, but for what every run has (flatout.runs).

Each name is imported when it is first used: the flags need `choose_input`, and no torch.

Files:

    autotune      What a picture and a step cost on this machine, for those who leave the input to us
    choose_input  What `--fast` and `--workers auto` mean on this machine: one function decides it, and says why
    input         Where training batches come from: the pictures of a training, augmented by workers or on the GPU
    prepare       The network at its first step
    recipe        Training a detector: the recipe that `train.py` hands to a run
    step          What a step of the detection job computes: images and targets in, loss out
    validate      Validation inside a training
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.yolo.train.recipe import TrainResult, YoloRecipe, train

__all__ = ["TrainResult", "YoloRecipe", "train"]

__getattr__, __dir__ = face(__name__)
