"""Training a detector: everything about `train.py` that is not common to all runs (flatout.runs).

Names are imported when they are first used: the flags need `choose_input`, but not torch.

Files:

    autotune      Autotuning of the input: measure what a sample and a step cost on this machine, and choose by it
    choose_input  Choosing the input for a machine: what `--fast` and `--workers auto` switch on here, and why
    input         The input of a training: images of a data set as augmented batches, made by workers or on the GPU
    prepare       Everything before the first step: network, anchors, frozen layers, optimizer
    recipe        The detection recipe: everything about `train.py` that is not common to all runs
    step          One step of a detection training: images and targets in, loss out
    validate      Validation during a training: the moving average on the validation images
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.yolo.train.recipe import TrainResult, YoloRecipe, train

__getattr__, __dir__ = face(__name__)
