"""A network as a file for other programs: ONNX and TorchScript, compared with torch before they are written.

    weights -> network -> folded -> form (raw, decoded, with NMS) -> traced -> compared on pictures -> file

    from flatout.yolo.export import ExportOptions, export
    outcome = export("best.pt", ExportOptions(grid=True, simplify=True))

`export` is imported when it is first used: the options alone, and so the command's help, need no torch.

Files:

    files        An export from beginning to end
    onnx_forms   A network as an ONNX model
    options      What an export was asked to write: one field per flag, under its own name
    postprocess  The modules that are traced, and what a file does with decoded boxes
    work         What every format of an export needs
"""

from importlib import import_module
from typing import TYPE_CHECKING

from flatout.yolo.export.options import ExportOptions

if TYPE_CHECKING:
    from flatout.yolo.export.files import ExportOutcome, export, export_network

__all__ = ["ExportOptions", "ExportOutcome", "export", "export_network"]

_NEED_TORCH = {
    "ExportOutcome": "flatout.yolo.export.files",
    "export": "flatout.yolo.export.files",
    "export_network": "flatout.yolo.export.files",
}


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name]), name)
