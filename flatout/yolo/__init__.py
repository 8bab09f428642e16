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
    from flatout.yolo.detector import Detector
    from flatout.yolo.predict.result import Result

__all__ = ["Detector", "Result", "load"]

_HOME = {"Detector": "flatout.yolo.detector", "Result": "flatout.yolo.predict.result"}


def load(path_or_cfg: str | Path, *, device: str = "") -> "Detector":
    """A detector from a file of weights (of ours, of YOLOv7, safetensors), or an untrained one from a model config.

    `device` is what `--device` takes: "cpu", the number of a GPU, or "" for a GPU if there is one. ConfigError or
    CheckpointError where there is no such thing; a file's content is read when it is first needed, and nothing in it
    is ever run.
    """
    from flatout.yolo.detector import Detector

    return Detector(path_or_cfg, device=device)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
