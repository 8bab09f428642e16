"""Defect segmentation: find what is in one picture of a die and in neither of two others. See docs/defect.md.

    import flatout.defect

    model = flatout.defect.load("best.pt")        # or an untrained network: "v1"
    for result in model.predict("strips/"):
        print(result.path, result.heat.max(), result.detections)

The public names are those in `__all__`, each imported when it is first used.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.defect.inspector import Inspected, Inspector

__all__ = ["Inspected", "Inspector", "load"]


def load(path_or_network: str | Path, *, device: str = "") -> "Inspector":
    """An inspector from a file of weights, or an untrained one from the name of a network: "v1" or "v2".

    `device` is "cpu", the number of a GPU, or "" for a GPU if there is one. CheckpointError if there is no such file.
    """
    from flatout.defect.inspector import Inspector

    return Inspector(path_or_network, device=device)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("flatout.defect.inspector"), name)
