"""Detection: YOLOv7's networks, loss, data and commands on flatout's engine.

    import flatout.yolo

    model = flatout.yolo.load("yolov7-tiny")      # trained weights that come with flatout; or yours: "best.pt"
    for result in model.predict("pictures/"):
        print(result.path, result.boxes, result.scores, result.classes)

The public names are those in `__all__`, each imported when it is first used; docs/api.md shows them at work.

Files:

    boxes         Box formats, the IoU family, and boxes between the network's input and the picture
    cli           flatout yolo: finds the command and hands over to it
    convert       Weights from one form to another
    detector      A detector in Python: the commands train, test, detect and export as methods of one object
    evolve        `--evolve`: better hyper-parameters by mutation and selection, one training per generation
    find_file     Which file a flag means: `--data`, `--cfg`, `--hyp` and `--weights`
    hyp           The hyper-parameters of a training: the 30 keys of YOLOv7's hyp files, and four more
    load_network  Networks from files of weights
    options       What a training or an evaluation was asked to do: one field per flag, under the flag's own name
    preview       A sheet of pictures with their boxes drawn on them: the check that no program can make
    profile       What `flatout yolo train` would run, to be looked at
    run_config    opt.yaml and hyp.yaml of a run: what it is, and what `--resume` reads
    augment/      Augmentation: all random numbers of a batch are drawn, then pictures and labels follow
    commands/     The commands of `flatout yolo`, one file each: `main(argv)` parses, calls the library, prints
    data/         Detection data sets: from YAML, folders, COCO JSON or VOC to checked labels and decoded pictures
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
    """A detector from weights, or an untrained one from a model config: "yolov7-tiny.yaml", "yolov7", a YAML of yours.

    Weights are a file (of flatout, of YOLOv7, safetensors) or the name of weights that come with flatout, such as
    "yolov7-tiny". A name that is also a config's means the weights; with .yaml at its end, the config.

    `device` is what `--device` takes: "cpu", the number of a GPU, or "" for a GPU if there is one. ConfigError or
    CheckpointError where there is no such thing; a file's content is read when it is first needed, and nothing in it
    is ever run.
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
    """A copy of a data set with smaller pictures, in the folder `out`: what `flatout yolo resize` does.

    The longer side becomes `size`; smaller pictures are copied unless `enlarge` is given. `stretch` makes squares.
    Labels are copied, COCO annotations scaled. Called again, it does what is missing. ConfigError if `out` holds other
    files or was made in another way, DataError if more than 1 % of the pictures cannot be read, ResourceError if the
    disk is too small, Interrupted after a signal.
    """
    from flatout.yolo.find_file import find_file

    found = data if Path(data).exists() else find_file(str(data))
    # Now, because a mistyped name is answered without NumPy.
    from flatout.yolo.data.resized_tree import ResizeConfig, write_resized

    config = ResizeConfig(size=size, stretch=stretch, enlarge=enlarge, quality=quality)
    return write_resized(found, out, config, workers=workers, show_progress=progress)


__getattr__, __dir__ = face(__name__)
