"""Object detection: YOLOv7's networks, loss, data and commands on flatout's engine.

    import flatout.yolo

    model = flatout.yolo.load("yolov7-tiny")      # trained weights that come with flatout; or yours: "best.pt"
    for result in model.predict("images/"):
        print(result.path, result.boxes, result.scores, result.classes)

The public names are those in `__all__`, each imported at first use; docs/api.md has examples.

Files:

    boxes         Box formats, IoU and its variants, mapping boxes back to the image, and grouped tensor operations
    cli           `flatout yolo`: run the command that was named
    convert       Convert weights to safetensors, to the format of flatout, or to deploy form
    detector      The Python interface: train, evaluate, predict and export as methods of one object
    evolve        `--evolve`: better hyper-parameters by mutation and selection, one training per generation
    find_file     Find the files that `--data`, `--cfg`, `--hyp` and `--weights` refer to
    hyp           The hyper-parameters of a training: the 30 keys of YOLOv7's hyp files, and four more
    load_network  Build networks from weights files, for inference and for training
    options       Options of a training and of an evaluation: one field per flag, with the name of the flag
    preview       A preview of a data set: images with their boxes on one sheet
    profile       The detection training for `flatout profile`
    run_config    opt.yaml and hyp.yaml of a run folder, and the identity by which runs are compared
    augment/      Augmentation: all random numbers of a batch are drawn, then pictures and labels follow
    commands/     The commands of `flatout yolo`, one file each: parse the arguments, call the library, print
    data/         Detection data sets: from a YAML, folders, COCO JSON or Pascal VOC to checked images and labels
    demo_data/    A detection data set that draws itself: six kinds of textured shapes before cluttered grounds
    evaluate/     How good is a network on a data set? The loop that training and `test.py` share
    export/       A network as a file for other programs
    loss/         What a detection costs
    metrics/      How good are the detections? Matching, average precision, confusion, fitness, COCO
    model/        Networks from model YAML: `build_network(load_config("yolov7-tiny"))`
    multihead/    Several heads on one backbone (1B4H): which classes share one, the layer, its maps and its loss
    nms/          Non-maximum suppression, exactly as YOLOv7 does it, for a whole batch at once
    predict/      What a trained network finds in pictures, videos and streams
    stages/       Several trainings as one job, each from the best weights of the one before: gradual unfreezing
    train/        Training a detector: the whole of `train.py`, but for what every run has (flatout.runs)
    weights/      Weights of a detection network: read from any file, kept in files of ours, moved into a network
"""

from pathlib import Path
from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.yolo.data.resized_tree import ResizedSet
    from flatout.yolo.detector import Detector
    from flatout.yolo.predict.result import Result

__all__ = ["Detector", "ResizedSet", "Result", "load", "resize"]


def load(path_or_cfg: str | Path, *, device: str = "") -> "Detector":
    """Load a detector from weights, or an untrained one from a model config.

    Weights are a file (of flatout, of YOLOv7, or safetensors), or the name of weights that come with flatout, such as
    "yolov7-tiny". A config is a name such as "yolov7-tiny.yaml" or "yolov7", or the path of a YAML file. If a name
    means both, the weights are loaded; with the ending .yaml it means the config.

    `device` is "cpu", the number of a GPU, or "" for a GPU if there is one, as for `--device`. Raises ConfigError or
    CheckpointError if the file does not exist. Its content is read at first use, and no code in it is ever run.
    """
    from flatout.yolo.detector import Detector

    return Detector(path_or_cfg, device=device)


def resize(
    data: str | Path,
    out: str | Path,
    *,
    size: int,
    stretch: bool = False,
    enlarge: bool = False,
    quality: int = 95,
    workers: int | str = "cpu*1.0",
    progress: bool = False,
) -> "ResizedSet":
    """Make a copy of a data set with smaller images in the folder `out`, like `flatout yolo resize`.

    The longer side becomes `size`; smaller images are copied unless `enlarge` is set. `stretch` makes squares. Labels
    are copied, COCO annotations are scaled. A second call makes only what is missing. Raises ConfigError if `out`
    contains other files or was made with other settings, DataError if more than 1 % of the images cannot be read,
    ResourceError if the disk is too small, Interrupted after a signal.
    """
    from flatout.yolo.find_file import find_file

    found = data if Path(data).exists() else find_file(str(data))
    # Imported late, so that the error for a mistyped name does not wait for NumPy.
    from flatout.yolo.data.resized_tree import ResizeConfig, write_resized

    config = ResizeConfig(size=size, stretch=stretch, enlarge=enlarge, quality=quality)
    return write_resized(found, out, config, workers=workers, show_progress=progress)


__getattr__, __dir__ = face(__name__)
