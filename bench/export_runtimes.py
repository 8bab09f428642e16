"""How close are exported networks to the network in each runtime: ONNX Runtime, OpenVINO, OpenCV's dnn and ncnn?

yolov7-tiny with the weights that come with flatout, on the photographs of the demo: the largest difference of raw maps
and of decoded boxes from torch, with and without --simplify. A runtime that is not installed, or that cannot read a
form, has the reason in its cell.
Answer: bench/results/export_runtimes_<machine>_<yyyymm>.md (rewrite it with --write).
"""

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from bench.measure import arguments, report
from flatout.errors import FlatoutError
from flatout.export import Model, Ncnn, OpenVino, Run, Session
from flatout.yolo.export import ExportOptions, onnx_forms
from flatout.yolo.export.parity import ExportContext
from flatout.yolo.export.postprocess import module_for, postprocess_for
from flatout.yolo.find_file import weights_file
from flatout.yolo.load_network import load_network

PHOTOGRAPHS = str(Path(__file__).resolve().parents[1] / "data/photographs")
FORMS: dict[str, dict[str, Any]] = {
    "raw maps": {},
    "raw maps, simplified": {"simplify": True},
    "--grid": {"grid": True},
    "--grid --simplify": {"grid": True, "simplify": True},
    "--grid --end2end --max-wh": {"grid": True, "end2end": True, "max_wh": 640},
}
PACKAGES = {
    "ONNX Runtime": "onnxruntime",
    "OpenVINO": "openvino",
    "OpenCV dnn": "opencv-python-headless",
    "ncnn": "ncnn",
}


def main() -> int:
    options = arguments(__doc__).parse_args()
    network = load_network(weights_file("yolov7-tiny")).network
    size = 64 if options.quick else 320
    lines = [f"yolov7-tiny, {size} px, six photographs; limits: a ten-thousandth of the size in boxes, 0.001 in scores"]
    lines += [f"{runtime}: {installed(package)}" for runtime, package in PACKAGES.items()]
    numbers: dict[str, Any] = {}
    for form, flags in FORMS.items():
        context = ExportContext.of(
            network, ExportOptions(img_size=(size, size), images=(PHOTOGRAPHS,), pictures=6, **flags)
        )
        for runtime in PACKAGES:
            cell = compared(context, runtime)
            numbers[f"{form}: {runtime}"] = cell
            lines.append(f"{form:<28} {runtime:<14} {cell}")
    report("export_runtimes", "\n".join(lines), numbers, options)
    return 0


def compared(context: ExportContext, runtime: str) -> str:
    """The largest difference of one form in one runtime, or why there is none."""
    options = context.options
    try:
        probe = onnx_forms.probe_of(context.folded, options, context.example)
        difference = onnx_forms.compared(OPENERS[runtime](context, probe), context.references, options)
    except cv2.error as error:
        return f"no: OpenCV cannot read this file ({error.err.strip().splitlines()[0][:60] or error.func})"
    except (FlatoutError, RuntimeError) as error:
        return f"no: {' '.join(str(error).split())[:110]}"
    return difference.text(context.accepted(difference, runtime))


def opencv_dnn(model: Model) -> Run:
    """An ONNX model loaded by OpenCV's dnn; raises cv2.error for what it cannot read."""
    network: Any = cv2.dnn.readNetFromONNX(np.frombuffer(model.SerializeToString(), np.uint8))
    names = [output.name for output in model.graph.output]

    def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        (images,) = inputs.values()
        network.setInput(images)
        return dict(zip(names, network.forward(names), strict=True))

    return run


def ncnn_of(context: ExportContext, probe: Any) -> Run:
    if postprocess_for(context.options).output_names:
        raise FlatoutError("flatout writes ncnn files without NMS")
    form = module_for(context.folded, context.options)
    names = [output.name for output in probe.graph.output]
    with torch.no_grad():
        return Ncnn(form, context.example[:1], input_name=onnx_forms.INPUT, output_names=names)


OPENERS: dict[str, Callable[[ExportContext, Any], Run]] = {
    "ONNX Runtime": lambda context, probe: Session(probe),
    "OpenVINO": lambda context, probe: OpenVino(probe),
    "OpenCV dnn": lambda context, probe: opencv_dnn(probe),
    "ncnn": ncnn_of,
}


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    raise SystemExit(main())
