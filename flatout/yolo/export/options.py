"""What an export was asked to write: one field per flag, under its own name. No torch: help must answer at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flatout.errors import ConfigError

Form = Literal["raw", "grid", "onnx-nms", "tensorrt-nms", "tensorrt-nms-corners"]
"""raw: one map per level. grid: boxes in pixels. The others: boxes after NMS, by ONNX's own node or by TensorRT's
plugin, which is given centres and sizes (--end2end) or corners (--include-nms)."""

FORMATS = ("torchscript", "onnx")
"""Written by default; what each is made by stands in files.py."""
REFUSED_FORMATS = {
    "coreml": "CoreML files are not written here; convert the TorchScript file with coremltools, on a Mac",
    "lite": "PyTorch Mobile has ended, and torch is built without what writes its files; use onnx or torchscript",
}
OPSETS = range(11, 21)
LEAST_OPSET_OF_INT8 = 13
"""Scales per channel came with it."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """An export as its command says it."""

    # Flags of YOLOv7
    weights: str = "./yolor-csp-c.pt"
    img_size: tuple[int, int] = (640, 640)
    """Height and width, before rounding up to the grid."""
    batch_size: int = 1
    dynamic: bool = False
    dynamic_batch: bool = False
    grid: bool = False
    end2end: bool = False
    max_wh: int | None = None
    """With end2end: ONNX's NMS, with classes so many pixels apart; None: TensorRT's."""
    topk_all: int = 100
    iou_thres: float = 0.45
    conf_thres: float = 0.25
    device: str = "cpu"
    """Where torch's own time is measured. Files are made and compared on the CPU, and do not depend on it."""
    simplify: bool = False
    include_nms: bool = False
    fp16: bool = False
    int8: bool = False

    # Ours
    formats: tuple[str, ...] = FORMATS
    cfg: str = ""
    """Model config of weights that hold none."""
    out: str = ""
    """Path of the files without their endings, or a folder; "": beside the weights, under their name."""
    data: str = ""
    images: tuple[str, ...] = ()
    """Pictures to compare on: the validation pictures of a data YAML, or files and folders; none: drawn ones."""
    pictures: int = 4
    """How many of them."""
    opset: int = 12

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))

    @property
    def form(self) -> Form:
        """NMS needs decoded boxes, so it implies --grid."""
        if self.end2end:
            return "tensorrt-nms" if self.max_wh is None else "onnx-nms"
        if self.include_nms:
            return "tensorrt-nms-corners"
        return "grid" if self.grid else "raw"

    @property
    def onnx_opset(self) -> int:
        """The opset that is written."""
        return max(self.opset, LEAST_OPSET_OF_INT8) if self.int8 else self.opset

    @property
    def free_batch(self) -> bool:
        """May the file be given any number of pictures?"""
        return self.dynamic_batch or self.free_size

    @property
    def free_size(self) -> bool:
        """May it be given pictures of any size? Not with NMS inside, nor if only the batch was to be free."""
        return self.dynamic and not self.dynamic_batch and self.form in ("raw", "grid")

    def without_effect(self) -> Iterator[str]:
        """What was asked for and changes nothing, or implies something else; a sentence each."""
        if self.form not in ("raw", "grid") and not self.grid:
            yield "NMS needs decoded boxes: --grid is taken as given."
        if self.dynamic and not self.free_size:
            yield "--dynamic has no effect with --dynamic-batch or NMS inside."
        if self.max_wh is not None and not self.end2end:
            yield "--max-wh has no effect without --end2end."
        if self.onnx_opset != self.opset:
            yield f"--int8 needs opset {self.onnx_opset}: it is used for every ONNX file."
        if "onnx" not in self.formats and (self.simplify or self.fp16 or self.int8):
            yield "--simplify, --fp16 and --int8 are about ONNX files, and none is written."
        if "torchscript" in self.formats and self.form not in ("raw", "grid"):
            yield "NMS is put into the ONNX file only; the TorchScript file gives decoded boxes."


def _problems(options: ExportOptions) -> Iterator[str]:
    for name, least in (("batch_size", 1), ("topk_all", 1), ("pictures", 1), ("max_wh", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            yield f"--{name.replace('_', '-')} {value} must be {least} or more"
    if min(options.img_size) < 1:
        yield f"--img-size {options.img_size[0]} {options.img_size[1]}: both sizes must be 1 or more"
    for name in ("conf_thres", "iou_thres"):
        if not 0 <= getattr(options, name) <= 1:
            yield f"--{name.replace('_', '-')} {getattr(options, name)} is outside 0 to 1"
    if options.end2end and options.include_nms:
        yield "--end2end and --include-nms both put NMS into the file: give one of them"
    if options.data and options.images:
        yield "--data and --images both say which pictures to compare on: give one of them"
    yield from _problems_of_formats(options)


def _problems_of_formats(options: ExportOptions) -> Iterator[str]:
    if not options.formats:
        yield f"--formats: name at least one of {', '.join(FORMATS)}"
    for name in options.formats:
        if name in REFUSED_FORMATS:
            yield f"--formats {name}: {REFUSED_FORMATS[name]}"
        elif name not in FORMATS:
            yield f"--formats {name} is none of {', '.join(FORMATS)}"
    if options.opset not in OPSETS:
        yield f"--opset {options.opset} is outside {OPSETS[0]} to {OPSETS[-1]}"
