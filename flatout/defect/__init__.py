"""Defect segmentation: find what is in one image of a die and in neither of two references. See docs/defect.md.

    import flatout.defect

    model = flatout.defect.load("best.pt")        # or an untrained network: "v1"
    for result in model.predict("strips/"):
        print(result.path, result.heat.max(), result.detections)

The public names are those in `__all__`, each imported when it is first used.

Files:

    check          Check every file of a data set for problems that would spoil a training
    cli            flatout defect: dispatches to the commands
    demo_data      Generates a demo data set: strips with a sine texture in three noisy planes
    export         Export of a network for whole images as an ONNX file that includes scaling, patches
    input          Training batches: painted by workers, or rendered on the GPU from parameters that workers draw
    inspector      Defect detection in Python: train, evaluate, predict and export as methods of one object
    model          The segmentation networks: a U-Net over patches of target, ref1 and ref2, with two classes
    options        Options of `flatout defect train`, `test` and `predict`
    patches        The grid of patches of a run: tiles of one size over images of one size
    plots          Plots of training samples and of results
    predict        Heat maps, detections and tables for a folder of images, with scores where labels exist
    profile        The defect training as `flatout profile` runs it
    render         Crops and paints a whole batch on the device that holds the images, without a host-device wait
    render_triton  The renderer as one Triton kernel that crops and paints a batch of patches
    report         The result of a test as one HTML page: scores, missed defects, false blobs and the worst images
    source         Sources of training samples: painted patches, or parameters for a GPU renderer
    step           One training step: network and focal loss; learning rate and focal gamma by epoch
    train          Training of a defect network: the recipe that `flatout defect train` hands to a run
    weights        Weights files of flatout and of older trainers, read without executing anything in them
    commands/      The commands of `flatout defect`: each parses, calls one library function and prints its result
    compare/       Comparison of an image with its references: alignment, differences, thresholds
    data/          From image files to canonical images: three aligned planes, target, ref1 and ref2
    evaluate/      Evaluation of a network: heat maps of whole images, and scores computed from them
    synth/         Synthetic defects: parameters are drawn for whole batches, then painted without further randomness
"""

from pathlib import Path
from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.defect.inspector import Inspected, Inspector

__all__ = ["Inspected", "Inspector", "load"]


def load(path_or_network: str | Path, *, device: str = "") -> "Inspector":
    """Load an inspector from a weights file, or create an untrained one from the name of a network: "v1" or "v2".

    "classical" is the method that compares aligned images without a network; it is for pairs. `device` is "cpu", the
    number of a GPU, or "" for a GPU if there is one. Raises CheckpointError if the file does not exist.
    """
    from flatout.defect.inspector import Inspector

    return Inspector(path_or_network, device=device)


__getattr__, __dir__ = face(__name__)
