"""Exporting a network to ONNX and TorchScript; every file is compared with torch before it is written.

    weights -> network -> folded -> form (raw, decoded, with NMS) -> traced -> compared on images -> file

    from flatout.yolo.export import ExportOptions, export
    outcome = export("best.pt", ExportOptions(grid=True, simplify=True))

`export` is imported when it is first used: the options, and with them the command's help, do not need torch.

Files:

    files        An export from beginning to end: files are built, compared, written, timed and reported
    onnx_forms   A network as an ONNX model: its forms, its precisions, its metadata, its comparison
    options      Options of an export: one field per flag, under the flag's own name. Does not import torch
    parity       Comparing files with their network: images, reference outputs, and accepted differences
    postprocess  The modules that are traced, and their postprocessing: none, or NMS by ONNX or TensorRT
"""

from typing import TYPE_CHECKING

from flatout.lazy import face
from flatout.yolo.export.options import ExportOptions

if TYPE_CHECKING:
    from flatout.yolo.export.files import ExportOutcome, export, export_network

__getattr__, __dir__ = face(__name__)
