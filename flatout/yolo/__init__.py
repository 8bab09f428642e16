"""Detection: YOLOv7's networks, loss, data and commands on flatout's engine.

    import flatout.yolo

    model = flatout.yolo.load("best.pt")          # or a config: "yolov7-tiny"
    for result in model.predict("pictures/"):
        print(result.path, result.boxes, result.scores, result.classes)

The public names are those in `__all__`, each imported when it is first used; docs/api.md shows them at work.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.yolo.data.resized_tree import ResizedSet
    from flatout.yolo.detector import Detector
    from flatout.yolo.predict.result import Result

__all__ = ["Detector", "ResizedSet", "Result", "load", "resize"]

_HOME = {
    "Detector": "flatout.yolo.detector",
    "ResizedSet": "flatout.yolo.data.resized_tree",
    "Result": "flatout.yolo.predict.result",
}


def load(path_or_cfg: str | Path, *, device: str = "") -> "Detector":
    """A detector from a file of weights (of ours, of YOLOv7, safetensors), or an untrained one from a model config.

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


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
