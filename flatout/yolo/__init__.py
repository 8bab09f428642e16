"""Object detection: YOLOv7's networks, loss, data and commands on flatout's engine.

    import flatout.yolo

    model = flatout.yolo.load("yolov7-tiny")      # trained weights that come with flatout; or yours: "best.pt"
    for result in model("images/"):
        print(result.path, result, result.boxes, result.labels)

The public names are those in `__all__`, each imported at first use; docs/api.md has examples.

Files:

    boxes         Pure tensor functions on boxes: formats, IoU and its variants, mapping to the image
    cli           `flatout yolo`: run the command that was named
    convert       Convert weights: any supported file to safetensors or to the .pt of flatout
    detector      The Python interface to detection: train, evaluate, predict and export as methods of one object
    evolve        `--evolve`: a genetic search for hyper-parameters, one training per generation
    find_file     Find the files that `--data`, `--cfg`, `--hyp` and `--weights` refer to
    hyp           The hyper-parameters of a training: the 30 keys of YOLOv7's hyp files, and four more
    load_network  Build networks from weights files: complete ones for inference
    options       Options of a training and of an evaluation: one field per flag, with the name of the flag
    preview       A preview of a data set: images with their boxes on one sheet
    profile       The detection training for `flatout profile`: which switches to try, and how to run a few steps
    run_config    opt.yaml and hyp.yaml of a run folder, and the identity by which two runs are compared
    augment/      Augmentation: all random numbers of a batch are drawn, then images and labels follow from them
    commands/     The commands of `flatout yolo`, one file each: `main(argv)` parses the arguments
    data/         Detection data sets: from a YAML and labels in one of ten formats to checked images and labels
    demo_data/    A generated detection data set: textured shapes of six classes on cluttered backgrounds
    evaluate/     Evaluating a network on a data set: the loop that training and `test.py` share, and `test.py` itself
    export/       Exporting a network to ONNX and TorchScript; every file is compared with torch before it is written
    label_audit/  Wrong labels, found by comparing them with what networks detect: `flatout yolo audit`
    loss/         Detection losses: YOLOv7's losses and their assignment of targets, batched
    metrics/      Scores of detections: matching, average precision, confusion matrix, fitness, COCO AP
    model/        Networks from model YAML: `build_network(load_config("yolov7-tiny"))`
    multihead/    Several heads on one backbone (1B4H): the groups of classes, the layer
    nms/          Non-maximum suppression, exactly as YOLOv7 does it, for a whole batch at once
    predict/      Detection in images, videos and streams: `detect.py`, and prediction in Python
    replays/      Replays: the samples of any step of a recorded run, their matches and losses
    stages/       Training in stages: several trainings as one job, each from the best weights of the one before
    train/        Training a detector: everything about `train.py` that is not common to all runs (flatout.runs)
    weights/      Weights of a detection network: read from files of several formats, saved in ours
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.lazy import face

if TYPE_CHECKING:
    import numpy as np

    from flatout.yolo.data.converted_set import ConvertedSet
    from flatout.yolo.data.resized_tree import ResizedSet
    from flatout.yolo.detector import Detector
    from flatout.yolo.label_audit.audit import AuditResult
    from flatout.yolo.predict.given import Given
    from flatout.yolo.predict.result import Result
    from flatout.yolo.replays.appearances import Appearance
    from flatout.yolo.replays.step import Replayed

__all__ = [
    "Appearance",
    "AuditResult",
    "ConvertedSet",
    "Detector",
    "Replayed",
    "ResizedSet",
    "Result",
    "appearances",
    "audit",
    "convert_data",
    "load",
    "predict_with",
    "replay",
    "resize",
]


def load(path_or_cfg: str | Path, *, device: str | int = "") -> "Detector":
    """Load a detector from weights, or an untrained one from a model config.

    Weights are a file (of flatout, of YOLOv7, or safetensors), or the name of weights that come with flatout, such as
    "yolov7-tiny", or that `flatout weights get` downloaded. A config is a name such as "yolov7-tiny.yaml" or "yolov7",
    or the path of a YAML file. If a name means both, the weights are loaded; with the ending .yaml it means the config.

    `device` is "cpu", the number of a GPU, or "" for a GPU if there is one, as for `--device`. Raises ConfigError or
    CheckpointError if the file does not exist. Its content is read at first use, and no code in it is ever run.
    """
    from flatout.yolo.detector import Detector

    return Detector(path_or_cfg, device=device)


def predict_with(
    run: "Callable[[np.ndarray], Any]",
    metadata: Mapping[str, str],
    source: "Given | Iterable[Given]",
    **options: Any,
) -> "Iterator[Result]":
    """Detect with an exported network; returns one result after the other, each of a whole image.

    flatout reads and cuts images, prepares the input, suppresses boxes and merges those of tiles.
    `run` calls the network in its runtime: float32 [B, 3, H, W], RGB in 0..1 -> the output of `export --grid`.
    `metadata` are those of the exported file: size of the input, names of the classes, and tiles, if the network was
    trained on tiles. `source` and `options` are those of `Detector.predict`, such as conf_thres=0.25; tiles=640 or
    tiles=None replace the tiles of the training. Sources that cannot be read are left out. Raises ConfigError if the
    file has other outputs or metadata.
    """
    from flatout.yolo.predict.exported import predict_with as predict

    return predict(run, metadata, source, options)


def audit(
    run: str | Path | None = None,
    *,
    weights: str | Path | Sequence[str | Path] = (),
    data: str | Path = "",
    split: Literal["train", "val", "test"] = "train",
    img_size: int = 0,
    batch_size: int = 32,
    device: str = "",
    workers: int = 8,
    mirrored: bool | None = None,
    tiles: int | None = None,
    tile_overlap: float | None = None,
    out: str | Path | None = None,
    progress: bool = False,
) -> "AuditResult":
    """Find labels that are probably wrong, like `flatout yolo audit`; the data set is never changed.

    Give the folder of a run, or `weights` and `data`. `mirrored`: look at mirrored images, too; None: if the training
    of the weights mirrored images. Writes audit.json, audit.csv and audit.html, and returns the findings as `records`,
    most probable first. Raises ConfigError, DataError or CheckpointError if that is not possible.
    """
    from flatout.yolo.label_audit.config import AuditConfig

    given = (weights,) if isinstance(weights, str | Path) else weights
    config = AuditConfig(
        run=None if run is None else Path(run),
        weights=tuple(map(str, given)),
        data=str(data),
        split=split,
        img_size=img_size,
        batch_size=batch_size,
        device=device,
        workers=workers,
        mirrored=mirrored,
        tiles=tiles,
        tile_overlap=tile_overlap,
        out=None if out is None else Path(out),
    )
    # Imported late, so that the error for a missing argument does not wait for torch.
    from flatout.yolo.label_audit.audit import audit as run_audit

    return run_audit(config, show_progress=progress)


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


def convert_data(
    data: str | Path,
    out: str | Path,
    *,
    to: str,
    images: Literal["copy", "link", "none"] = "copy",
    progress: bool = False,
) -> "ConvertedSet":
    """Write a data set in another label format to the folder `out`, like `flatout yolo convert-data`.

    `to` is yolo, coco, voc, labelme, cvat, createml, openimages or huggingface. Images are copied, linked, or left
    where they are (`none`). A second call makes only what is missing. Raises ConfigError if `out` contains other files
    or was made with other settings, DataError if the data set cannot be read, ResourceError if the disk is too small,
    Interrupted after a signal.
    """
    from flatout.yolo.find_file import find_data

    found = find_data(str(data))
    # Imported late, so that the error for a mistyped name does not wait for NumPy.
    from flatout.yolo.data.converted_set import convert_data

    return convert_data(found, out, to=to, images=images, show_progress=progress)


def replay(
    run: str | Path,
    *,
    epoch: int,
    step: int,
    losses: bool = True,
    weights: str | Path = "",
    data: str | Path = "",
    device: str = "",
    allow_data_change: bool = False,
) -> "Replayed":
    """Make the input of one step of a run again, like `flatout yolo replay`: images, targets, and where they come from.

    `run` is a run folder; epochs and steps count from 0. With `losses`, matches and losses are computed with `weights`,
    by default with the state that was saved nearest to the step. `data` is the data YAML, if it is not where the run
    had it. `device` is "cpu", the number of a GPU, or "" for a GPU if the run used one. Raises ConfigError if there is
    no such run or step, DataError if images or labels have changed, unless `allow_data_change` is set.
    """
    from flatout.yolo.find_file import find_run

    run = find_run(run)
    # Imported late, so that the error for a mistyped folder does not wait for torch.
    from flatout.yolo.replays.losses import replay_with_losses
    from flatout.yolo.replays.run import ReplayRun

    opened = ReplayRun(run, data=str(data), device=device, allow_data_change=allow_data_change)
    return replay_with_losses(opened, epoch, step, weights=str(weights), losses=losses)


def appearances(
    run: str | Path,
    file: str | Path,
    *,
    epochs: range | None = None,
    data: str | Path = "",
    allow_data_change: bool = False,
    progress: bool = False,
) -> "list[Appearance]":
    """In which steps of a run an image was shown, and how, like `flatout yolo replay --file`; no image is read.

    `file` is the path of a training image or the end of it, `epochs` limits the search. Raises as `replay` does.
    """
    from flatout.yolo.find_file import find_run

    run = find_run(run)
    # Imported late, as above.
    from flatout.yolo.replays.appearances import appearances
    from flatout.yolo.replays.run import ReplayRun

    opened = ReplayRun(run, data=str(data), device="cpu", allow_data_change=allow_data_change)
    return appearances(opened, file, epochs=epochs, show_progress=progress)


__getattr__, __dir__ = face(__name__)
