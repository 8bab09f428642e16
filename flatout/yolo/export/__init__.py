"""A network as a file for other programs: ONNX and TorchScript, compared with torch before they are written.

    weights -> network -> folded -> form (raw, decoded, with NMS) -> traced -> compared on pictures -> file

    from flatout.yolo.export import ExportOptions, export
    outcome = export("best.pt", ExportOptions(grid=True, simplify=True))

`export` is imported when it is first used: the options alone, and so the command's help, need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from flatout.yolo.export.options import ExportOptions

if TYPE_CHECKING:
    from flatout.yolo.export.outcome import ExportOutcome
    from flatout.yolo.export.whole import export, export_network

__all__ = ["ExportOptions", "ExportOutcome", "export", "export_network"]

_NEED_TORCH = {
    "ExportOutcome": "flatout.yolo.export.outcome",
    "export": "flatout.yolo.export.whole",
    "export_network": "flatout.yolo.export.whole",
}


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name]), name)
