"""Options of an export: one field per flag, under the flag's own name. Does not import torch, so that help is fast."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flatout.errors import ConfigError
from flatout.runs import too_small
from flatout.yolo.predict.options import tile_problems

Form = Literal["raw", "grid", "onnx-nms", "tensorrt-nms", "tensorrt-nms-corners"]
"""raw: one map per level. grid: boxes in pixels. The others: boxes after NMS, by ONNX's own node or by TensorRT's
plugin, whose input are centres and sizes (--end2end) or corners (--include-nms)."""

FORMATS = ("torchscript", "onnx", "openvino", "ncnn")
"""All formats."""
DEFAULT_FORMATS = ("torchscript", "onnx")
"""Written without --formats. A list of its own, so that a further format is not written unasked."""
_TENSORRT = (
    "an engine is built on the GPU that will run it; export ONNX, then run there: "
    "trtexec --onnx=best.onnx --saveEngine=best.engine --fp16"
)
REFUSED_FORMATS = {
    "coreml": "flatout does not write CoreML files; convert the TorchScript file with coremltools, on a Mac",
    "tensorrt": _TENSORRT,
    "engine": _TENSORRT,
    "lite": "PyTorch Mobile is discontinued, and torch no longer writes its files; use onnx or torchscript",
}
OPSETS = range(11, 21)
LEAST_OPSET_OF_INT8 = 13
"""The first opset with scales per channel."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export."""

    # Flags of YOLOv7
    weights: str = "./yolor-csp-c.pt"
    img_size: tuple[int, int] = (640, 640)
    """Height and width, before they are rounded up to the grid."""
    batch_size: int = 1
    dynamic: bool = False
    dynamic_batch: bool = False
    grid: bool = False
    end2end: bool = False
    max_wh: int | None = None
    """With end2end: use ONNX's NMS and shift classes apart by this many pixels; None: use TensorRT's plugin."""
    topk_all: int = 100
    iou_thres: float = 0.45
    conf_thres: float = 0.25
    device: str = "cpu"
    """Device on which torch's own time is measured. Files are always made and compared on the CPU."""
    simplify: bool = False
    include_nms: bool = False
    fp16: bool = False
    int8: bool = False

    # Ours
    formats: tuple[str, ...] = DEFAULT_FORMATS
    cfg: str = ""
    """Model config, for weights that contain none."""
    out: str = ""
    """Path of the files without endings, or a folder; "": beside the weights, under their name."""
    data: str = ""
    """Data YAML whose validation images are used for the comparison."""
    images: tuple[str, ...] = ()
    """Image files and folders for the comparison. Without `data` and `images`, generated images are used."""
    pictures: int = 4
    """Number of images for the comparison."""
    opset: int = 12
    tiles: int | None = None
    """Side of the tiles that images are cut into, for the metadata; None: as the weights were trained."""
    tile_overlap: float = 0.2

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))

    @property
    def form(self) -> Form:
        """What the file outputs: raw maps, decoded boxes (--grid), or boxes after NMS, with or without --grid."""
        if self.end2end:
            return "tensorrt-nms" if self.max_wh is None else "onnx-nms"
        if self.include_nms:
            return "tensorrt-nms-corners"
        return "grid" if self.grid else "raw"

    @property
    def onnx_opset(self) -> int:
        """The opset of the ONNX files."""
        return max(self.opset, LEAST_OPSET_OF_INT8) if self.int8 else self.opset

    @property
    def free_batch(self) -> bool:
        """Whether the file accepts any batch size."""
        return self.dynamic_batch or self.free_size

    @property
    def free_size(self) -> bool:
        """Whether the file accepts any image size: not with NMS inside, nor with --dynamic-batch."""
        return self.dynamic and not self.dynamic_batch and self.form in ("raw", "grid")

    def without_effect(self) -> Iterator[str]:
        """Warnings about options that change nothing, or that imply others."""
        if self.form not in ("raw", "grid") and not self.grid:
            yield "NMS needs decoded boxes, so --grid is switched on."
        if self.dynamic and not self.free_size:
            yield "--dynamic has no effect with --dynamic-batch or NMS inside."
        if self.max_wh is not None and not self.end2end:
            yield "--max-wh has no effect without --end2end."
        if self.onnx_opset != self.opset:
            yield f"--int8 needs opset {self.onnx_opset}: it is used for every ONNX file."
        simplified = self.simplify and "openvino" not in self.formats
        if "onnx" not in self.formats and (simplified or self.fp16 or self.int8):
            yield "--simplify, --fp16 and --int8 have no effect: no ONNX file is written."
        if set(self.formats) - {"onnx"} and self.form not in ("raw", "grid"):
            yield "NMS is only in the ONNX file; a file in another format outputs decoded boxes."
        if "ncnn" in self.formats and (self.dynamic or self.dynamic_batch):
            yield "--dynamic and --dynamic-batch have no effect on ncnn, whose input has a fixed size."


def _problems(options: ExportOptions) -> Iterator[str]:
    yield from too_small(options, 1, "batch_size", "topk_all", "pictures")
    yield from too_small(options, 0, "max_wh")
    if min(options.img_size) < 1:
        yield f"--img-size {options.img_size[0]} {options.img_size[1]}: both sizes must be 1 or more"
    for name in ("conf_thres", "iou_thres"):
        if not 0 <= getattr(options, name) <= 1:
            yield f"--{name.replace('_', '-')} {getattr(options, name)} is outside 0 to 1"
    if options.end2end and options.include_nms:
        yield "--end2end and --include-nms both put NMS into the file: give one of them"
    if options.data and options.images:
        yield "--data and --images both name the images to compare on: give one of them"
    yield from tile_problems(options.tiles, options.tile_overlap)
    yield from _problems_of_formats(options)


def _problems_of_formats(options: ExportOptions) -> Iterator[str]:
    if not options.formats:
        yield f"--formats: name at least one of {', '.join(FORMATS)}"
    for name in options.formats:
        if name in REFUSED_FORMATS:
            yield f"--formats {name}: {REFUSED_FORMATS[name]}"
        elif name not in FORMATS:
            yield f"--formats {name} is none of {', '.join(FORMATS)}"
    if "ncnn" in options.formats and options.batch_size != 1:
        yield f"--formats ncnn: ncnn has no batches, so --batch-size {options.batch_size} cannot be used; give 1"
    if options.opset not in OPSETS:
        yield f"--opset {options.opset} is outside {OPSETS[0]} to {OPSETS[-1]}"
