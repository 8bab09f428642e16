"""A network as an ONNX model: its forms, its precisions, its metadata, its comparison.

    folded network + postprocess --traced--> probe: the model with the decoded boxes as an additional output
    probe --compared--> 1. its decoded boxes are those of the network   2. its outputs are what torch computes from them
    probe --final_model--> the model without that output: the same nodes

The outputs are compared with what torch computes from the model's own boxes, not from the network's: NMS turns a
difference in the last bit into a box more or less. With a TensorRT plugin the comparison ends where the plugin begins,
because no other runtime has it.
"""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatout import __version__
from flatout.export import (
    Model,
    Precision,
    Run,
    Session,
    check,
    in_float16_up_to_last_convolutions,
    in_int8,
    last_convolutions,
    require_package,
    set_metadata,
    set_output_shapes,
    simplified,
    traced,
    without_outputs,
)
from flatout.yolo.export.options import ExportOptions, Form
from flatout.yolo.export.parity import Difference, check_same, difference_of, largest
from flatout.yolo.export.postprocess import (
    DECODED,
    PLUGIN,
    Postprocess,
    Reference,
    module_for,
    postprocess_for,
)
from flatout.yolo.model.network import Network

# Metadata

OUTPUTS: dict[Form, str] = {
    "raw": "maps before the logistic function, one per level",
    "grid": "cx, cy, w, h in pixels of the input, objectness, class scores (not multiplied)",
    "onnx-nms": "rows of image, x1, y1, x2, y2, class, score after NMS",
    "tensorrt-nms": "num_dets, det_boxes, det_scores, det_classes of TensorRT's EfficientNMS_TRT",
    "tensorrt-nms-corners": "num_dets, det_boxes, det_scores, det_classes of TensorRT's EfficientNMS_TRT",
}


def metadata_of(network: Network, options: ExportOptions, hw: tuple[int, int], form: Form) -> dict[str, str]:
    """Metadata of a file: how to prepare its input and read its output. All values are text."""
    metadata = {
        "names": json.dumps(list(network.names)),
        "stride": str(int(network.stride.max())),
        "strides": ",".join(f"{stride:g}" for stride in network.stride.tolist()),
        "input_range": "0..1",
        "input_colors": "RGB",
        "input_layout": "NCHW",
        "input_size_hw": "any multiple of the stride" if options.free_size else f"{hw[0]},{hw[1]}",
        "input_batch": "any" if options.free_batch else str(options.batch_size),
        "output": OUTPUTS[form],
        "flatout": __version__,
    }
    if form not in ("raw", "grid"):
        metadata["nms"] = json.dumps(
            {
                "iou_thres": options.iou_thres,
                "conf_thres": options.conf_thres,
                "topk_all": options.topk_all,
                "max_wh": options.max_wh,
            }
        )
    if options.tiles is not None:
        metadata["tiles"] = json.dumps({"tile": options.tiles, "overlap": options.tile_overlap})
    return metadata


# Models

INPUT = "images"
"""Name of the input."""
Shape = tuple[int | str, ...]
"""Lengths of axes, or names of free ones."""


def probe_of(network: Network, options: ExportOptions, example: Tensor) -> Model:
    """The model with all outputs that are compared; the network is folded, in evaluation mode and on the CPU."""
    module = module_for(network, options)
    shapes = output_shapes(module, options, example)
    model = traced(
        module,
        {INPUT: example},
        output_names=list(shapes),
        free_axes=_free_axes(options, shapes),
        opset=options.onnx_opset,
    )
    set_output_shapes(model, shapes)
    if options.simplify:
        model = simplified(model)
        set_output_shapes(model, shapes)
    set_metadata(model, metadata_of(network, options, (example.shape[2], example.shape[3]), options.form))
    return model


def final_model(probe: Model, postprocess: Postprocess) -> Model:
    """The model as it is written: without the additional output of the probe."""
    model = without_outputs(probe, [DECODED] if postprocess.output_names else [])
    check(model)
    return model


def without_plugin(probe: Model, postprocess: Postprocess) -> Model:
    """The part of the model that ONNX Runtime can run: up to the plugin, whose inputs become outputs."""
    if not postprocess.uses_plugin:
        return probe
    onnx = require_package("onnx")
    model = without_outputs(probe, postprocess.output_names)
    (plugin,) = [node for node in model.graph.node if node.op_type == PLUGIN]
    model.graph.node.remove(plugin)
    for name in plugin.input:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return model


def with_plugin(model: Model, probe: Model, postprocess: Postprocess) -> Model:
    """The inverse of `without_plugin`: `model` with the plugin of the probe appended."""
    if not postprocess.uses_plugin:
        return model
    (plugin,) = [node for node in probe.graph.node if node.op_type == PLUGIN]
    made = without_outputs(model, plugin.input)
    made.graph.node.append(plugin)
    made.graph.output.extend(output for output in probe.graph.output if output.name in postprocess.output_names)
    known = {each.domain for each in made.opset_import}
    made.opset_import.extend(each for each in probe.opset_import if each.domain not in known)
    return made


@torch.no_grad()
def compared(run: Run, references: Iterable[Reference], options: ExportOptions) -> Difference:
    """The largest difference of a model in any runtime from the network; ParityError if its postprocessing is wrong."""
    return largest(_difference(run({INPUT: each.images}), each, options) for each in references)


def _difference(found: dict[str, np.ndarray], reference: Reference, options: ExportOptions) -> Difference:
    """The difference of one run's outputs, by name, in the order of the model."""
    if options.form == "raw":
        return difference_of(list(found.values()), reference, raw=True)
    postprocess = postprocess_for(options)
    decoded = found.pop(_boxes_of(postprocess))
    for (name, output), expected in zip(found.items(), postprocess.portable(torch.from_numpy(decoded)), strict=True):
        check_same(output, expected.numpy(), f"the model's {name}")
    return difference_of([decoded], reference, raw=False)


def decoded_by(model: Model, inputs: Sequence[np.ndarray], postprocess: Postprocess) -> list[np.ndarray]:
    """Decoded boxes of a probe that outputs them, one array per input."""
    session = Session(without_plugin(model, postprocess))
    return [session({INPUT: x})[_boxes_of(postprocess)] for x in inputs]


def _boxes_of(postprocess: Postprocess) -> str:
    """Name of the output with the decoded boxes."""
    return DECODED if postprocess.output_names else "output"


@torch.no_grad()
def output_shapes(module: nn.Module, options: ExportOptions, example: Tensor) -> dict[str, Shape]:
    """Shapes of the outputs by name; free axes have names instead of lengths."""
    found = module(example)
    tensors = (found,) if isinstance(found, Tensor) else found
    names = [*postprocess_for(options).output_names, DECODED]
    if options.form in ("raw", "grid"):
        names = [f"output{number + 1 if number else ''}" for number in range(len(tensors))]
    shapes: dict[str, Shape] = {}
    for name, tensor in zip(names, tensors, strict=True):
        free: dict[int, str] = {0: "batch"} if options.free_batch else {}
        if options.free_size:
            free |= {1: "boxes"} if tensor.ndim == 3 else {2: "y", 3: "x"}
        if options.form == "onnx-nms" and name == "output":
            free = {0: "detections"}
        shapes[name] = tuple(free.get(axis, length) for axis, length in enumerate(tensor.shape))
    return shapes


def _free_axes(options: ExportOptions, shapes: dict[str, Shape]) -> dict[str, dict[int, str]]:
    axes = {
        name: {axis: length for axis, length in enumerate(shape) if isinstance(length, str)}
        for name, shape in shapes.items()
    }
    if options.free_batch:
        axes[INPUT] = {0: "batch"} | ({2: "height", 3: "width"} if options.free_size else {})
    return {name: free for name, free in axes.items() if free}


# Reduced precision: float16 or int8
#
# Such a file is not the same network, so its loss is measured and reported, but has no limit. Only boxes with an
# objectness above --conf-thres in float32 count. Decoding stays in float32, because half precision cannot distinguish
# pixels beyond 2048, and so do the convolutions before it in an int8 file.


class PrecisionLoss(NamedTuple):
    """Differences of a model in reduced precision from the boxes of the float32 model."""

    num_boxes: int
    """Raw boxes that were compared, before NMS."""
    threshold: float
    """Objectness above which a box counts."""
    median_px: float
    largest_px: float
    largest_score: float

    def text(self) -> str:
        if not self.num_boxes:
            return f"no raw box above {self.threshold:g} in these images, so the loss of precision is unknown"
        return (
            f"{self.num_boxes} raw boxes above {self.threshold:g} differ by {self.median_px:.2g} px (median), at most "
            f"{self.largest_px:.2g} px and {self.largest_score:.2g} in scores"
        )


def in_precision(probe: Model, precision: Precision, inputs: Sequence[np.ndarray], postprocess: Postprocess) -> Model:
    """The model in reduced precision; the ranges of int8 are calibrated on the inputs."""
    model = without_plugin(probe, postprocess)
    if precision == "float16":
        reduced = in_float16_up_to_last_convolutions(model)
    else:
        reduced = in_int8(model, inputs, input_name=INPUT, kept=last_convolutions(model))
    return with_plugin(reduced, probe, postprocess)


def precision_loss(
    model: Model, probe: Model, inputs: Sequence[np.ndarray], options: ExportOptions
) -> PrecisionLoss | None:
    """How much the decoded boxes differ; None for a file with raw maps."""
    if options.form == "raw":
        return None
    postprocess = postprocess_for(options)
    full, reduced = (np.concatenate([each.reshape(-1, each.shape[2]) for each in decoded_by(one, inputs, postprocess)])
                     for one in (probe, model))  # fmt: skip
    counts = full[:, 4] > options.conf_thres
    apart = np.abs(full - reduced)[counts]
    if not len(apart):
        return PrecisionLoss(0, options.conf_thres, 0.0, 0.0, 0.0)
    boxes_px = apart[:, :4].max(1)
    return PrecisionLoss(
        len(apart), options.conf_thres, float(np.median(boxes_px)), float(boxes_px.max()), float(apart[:, 4:].max())
    )
