"""Every flag of an export and what it does, for people who read `--help`."""

import argparse
from collections.abc import Sequence
from typing import Any

from flatout.yolo.compat.flag import switch, value


class OneFile(argparse.Action):
    """Takes one value, and says what to do about more."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given: Sequence[str] = values
        if len(given) > 1:
            parser.error(f"{option} {' '.join(given)}: a file holds one network, no ensemble. Export each on its own.")
        setattr(namespace, self.dest, given[0])


YOLOV7 = (
    value("--weights", "weights to export", nargs="+", action=OneFile, metavar="FILE"),
    value("--img-size", "height and width of the input; one number is both", type=int, nargs="+", metavar="PX"),
    value("--batch-size", "pictures per call", type=int),
    switch("--dynamic", "any number of pictures of any size (without NMS inside)"),
    switch("--dynamic-batch", "any number of pictures"),
    switch("--grid", "boxes in pixels; without it: raw maps, one per level"),
    switch("--end2end", "put NMS into the ONNX file: TensorRT's plugin, or ONNX's own with --max-wh"),
    value("--max-wh", "ONNX's NMS, with classes moved so many pixels apart; 0: across classes", type=int, metavar="PX"),
    value("--topk-all", "boxes of a picture that NMS keeps, at most", type=int, metavar="N"),
    value("--iou-thres", "of two boxes that overlap more, NMS keeps the more certain one", type=float, metavar="IOU"),
    value("--conf-thres", "NMS forgets boxes that are less certain", type=float, metavar="CONF"),
    value("--device", "where torch's time is measured: cpu, or the number of a GPU"),
    switch("--simplify", "compute constants and drop needless nodes (onnxslim)"),
    switch("--include-nms", "NMS by TensorRT's plugin on corners, as older versions wrote it"),
    switch("--fp16", "also write an ONNX file in half precision (YOLOv7: in CoreML)"),
    switch("--int8", "also write an ONNX file with convolutions of 8 bits (YOLOv7: in CoreML)"),
)

OURS = (
    value("--formats", "what to write: torchscript, onnx (default: both)", nargs="+", metavar="FORMAT"),
    value("--out", "path of the files without ending, or a folder (default: beside the weights)", metavar="PATH"),
    value("--cfg", "model config of weights that do not hold one"),
    value("--data", "data YAML whose validation pictures the files are compared on (default: drawn pictures)"),
    value("--images", "pictures, folders or lists to compare on, instead of --data", nargs="+", metavar="PATH"),
    value("--pictures", "how many of them", type=int, metavar="N"),
    value("--opset", "version of ONNX's operators", type=int, metavar="N"),
)

DESCRIPTION = """\
Write a network for other programs: ONNX and TorchScript. Batch norms, RepConv branches and implicit vectors are folded,
auxiliary heads left out. Every file is compared with the network on pictures before it is written; sizes and times are
printed. Every flag of YOLOv7's export.py is here and may be shortened as there.
"""
EPILOG = """\
examples:
  %(prog)s --weights best.pt --grid --simplify                      best.onnx: boxes in pixels
  %(prog)s --weights best.pt --grid --dynamic-batch --data my.yaml  any batch, compared on your pictures
  %(prog)s --weights best.pt --grid --end2end --max-wh 640          NMS inside, for ONNX Runtime
  %(prog)s --weights best.pt --grid --end2end                       NMS inside, for TensorRT

Exit code: 0, 2 wrong options or a package is missing, 3 pictures, 4 weights, 5 no room, 8 a file is not the network.
"""
