"""Defect segmentation: find what is in one picture of a die and in neither of two others. See docs/defect.md.

    import flatout.defect

    model = flatout.defect.load("best.pt")        # or an untrained network: "v1"
    for result in model.predict("strips/"):
        print(result.path, result.heat.max(), result.detections)

The public names are those in `__all__`, each imported when it is first used.

Files:

    check          What would spoil a training, in every file of a data set
    cli            flatout defect: finds the command and hands over to it
    demo_data      A data set to try things on
    export         A network for whole images as an ONNX file
    input          Where training batches come from
    inspector      Finding defects in Python: the commands train, test, predict and export as methods of one object
    model          The segmentation networks: a U-Net over patches of target, ref1 and ref2, with two classes out
    options        What a training or a test was asked to do
    patches        Where patches lie in an image, and which one a sample's number means
    pictures       Pictures for people: what a network learned from, and what it sees in an image
    predict        The ways out: heat maps
    profile        What `flatout defect train` would run, to be looked at
    render         Crop and paint a whole batch where the images are, without a host-device wait
    render_triton  A batch of patches, cropped and painted by one Triton kernel where the images are
    source         Training samples
    step           What a step of the defect job computes: patches in, focal loss out; and its rates by epoch
    train          Training a defect network: the recipe that `flatout defect train` hands to a run
    weights        Networks in files: of ours, and of the trainers that came before. Nothing in a file is ever run
    commands/      The commands of `flatout defect`: each parses, calls one library function, and prints its result
    data/          From files to canonical images: three aligned pictures of one pattern, target, ref1 and ref2
    evaluate/      How good is a network: heat maps of whole images, and numbers about them
    synth/         Synthetic defects
"""

from pathlib import Path
from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.defect.inspector import Inspected, Inspector

__all__ = ["Inspected", "Inspector", "load"]


def load(path_or_network: str | Path, *, device: str = "") -> "Inspector":
    """An inspector from a file of weights, or an untrained one from the name of a network: "v1" or "v2".

    `device` is "cpu", the number of a GPU, or "" for a GPU if there is one. CheckpointError if there is no such file.
    """
    from flatout.defect.inspector import Inspector

    return Inspector(path_or_network, device=device)


__getattr__, __dir__ = face(__name__)
