"""A network as an ONNX model: its forms, half precision and 8 bits, what it says about itself, its comparison.

    folded network + tail --traced--> probe: the model with one output more, the decoded boxes
    probe --compared--> 1. its boxes are those of the network   2. its answer is what torch makes of these very boxes
    probe --shipped--> the model without that output: the same nodes

Comparing the answer with what torch makes of the network's own boxes would be a test of luck: NMS turns a difference in
the last bit into a box more or less. With a TensorRT plugin the answer ends where the plugin begins: no other runtime
has it.
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
    Session,
    check,
    in_float16_up_to_last_convolutions,
    in_int8,
    last_convolutions,
    need,
    simplified,
    state_facts,
    state_shapes,
    traced,
    without_outputs,
)
from flatout.yolo.export.options import ExportOptions, Form
from flatout.yolo.export.postprocess import DECODED, PLUGIN, DecodedBoxes, Judged, RawLevels, Tail, WithTail, tail_for
from flatout.yolo.export.work import Difference, check_same, largest, of_decoded, of_raw
from flatout.yolo.model.network import Network

# What a file says about itself, so that nobody has to guess how to feed it.

OUTPUTS: dict[Form, str] = {
    "raw": "maps before the logistic function, one per level",
    "grid": "cx, cy, w, h in pixels of the input, objectness, class scores (not multiplied)",
    "onnx-nms": "rows of image, x1, y1, x2, y2, class, score after NMS",
    "tensorrt-nms": "num_dets, det_boxes, det_scores, det_classes of TensorRT's EfficientNMS_TRT",
    "tensorrt-nms-corners": "num_dets, det_boxes, det_scores, det_classes of TensorRT's EfficientNMS_TRT",
}


def facts_of(network: Network, options: ExportOptions, hw: tuple[int, int], form: Form) -> dict[str, str]:
    """Metadata of a file, all of it text."""
    facts = {
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
        facts["nms"] = json.dumps(
            {
                "iou_thres": options.iou_thres,
                "conf_thres": options.conf_thres,
                "topk_all": options.topk_all,
                "max_wh": options.max_wh,
            }
        )
    return facts


INPUT = "images"
Shape = tuple[int | str, ...]


def probe_of(network: Network, options: ExportOptions, example: Tensor) -> Model:
    """The model with everything in it that is compared; the network is folded, in evaluation mode and on the CPU."""
    module = _module(network, options)
    shapes = _shapes(module, options, example)
    model = traced(
        module,
        example,
        input_name=INPUT,
        output_names=list(shapes),
        free_axes=_free_axes(options, shapes),
        opset=options.onnx_opset,
    )
    state_shapes(model, shapes)
    if options.simplify:
        model = simplified(model)
        state_shapes(model, shapes)
    state_facts(model, facts_of(network, options, (example.shape[2], example.shape[3]), options.form))
    return model


def shipped(probe: Model, tail: Tail) -> Model:
    """The model as users get it."""
    model = without_outputs(probe, [DECODED] if tail.output_names else [])
    check(model)
    return model


def runnable(probe: Model, tail: Tail) -> Model:
    """The model as far as ONNX Runtime can run it: up to the plugin, whose inputs become outputs."""
    if not tail.uses_plugin:
        return probe
    onnx = need("onnx")
    model = without_outputs(probe, tail.output_names)
    (plugin,) = [node for node in model.graph.node if node.op_type == PLUGIN]
    model.graph.node.remove(plugin)
    for name in plugin.input:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return model


def with_plugin(model: Model, probe: Model, tail: Tail) -> Model:
    """What `runnable` took from a probe is put back behind what was made of the rest."""
    if not tail.uses_plugin:
        return model
    (plugin,) = [node for node in probe.graph.node if node.op_type == PLUGIN]
    made = without_outputs(model, plugin.input)
    made.graph.node.append(plugin)
    made.graph.output.extend(output for output in probe.graph.output if output.name in tail.output_names)
    known = {each.domain for each in made.opset_import}
    made.opset_import.extend(each for each in probe.opset_import if each.domain not in known)
    return made


@torch.no_grad()
def compared(probe: Model, judged: Iterable[Judged], options: ExportOptions) -> Difference:
    """How far the model is from the network; ParityError if what it makes of its boxes is wrong."""
    tail = tail_for(options)
    model = runnable(probe, tail)
    session = Session(model)
    names = [output.name for output in model.graph.output]
    if options.form == "raw":
        return largest(_raw_difference(session, names, each) for each in judged)
    return largest(_difference(session, names, tail, each) for each in judged)


def decoded_by(model: Model, inputs: Sequence[np.ndarray], tail: Tail) -> list[np.ndarray]:
    """Decoded boxes of a probe that gives any, one array per input."""
    session = Session(runnable(model, tail))
    return [session({INPUT: x})[_boxes_of(tail)] for x in inputs]


def _raw_difference(session: Session, names: Sequence[str], judged: Judged) -> Difference:
    found = session({INPUT: judged.images})
    return largest(of_raw(found[name], level) for name, level in zip(names, judged.raw, strict=True))


def _difference(session: Session, names: Sequence[str], tail: Tail, judged: Judged) -> Difference:
    found = session({INPUT: judged.images})
    decoded = found[_boxes_of(tail)]
    answers = [name for name in names if name != _boxes_of(tail)]
    for name, expected in zip(answers, tail.visible(torch.from_numpy(decoded)), strict=True):
        check_same(found[name], expected.numpy(), f"the model's {name}")
    return of_decoded(decoded, judged.decoded)


def _boxes_of(tail: Tail) -> str:
    """Name of the output that holds decoded boxes."""
    return DECODED if tail.output_names else "output"


def _module(network: Network, options: ExportOptions) -> nn.Module:
    if options.form == "raw":
        return RawLevels(network).eval()
    if options.form == "grid":
        return DecodedBoxes(network).eval()
    return WithTail(network, tail_for(options)).eval()


@torch.no_grad()
def _shapes(module: nn.Module, options: ExportOptions, example: Tensor) -> dict[str, Shape]:
    """Outputs by name, with the names of free axes in place of their lengths."""
    found = module(example)
    tensors = (found,) if isinstance(found, Tensor) else found
    names = [*tail_for(options).output_names, DECODED]
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


# Smaller ONNX files: half precision or 8 bits. They are not the same network, so their loss is measured, not judged.
#
# What counts are the boxes that the whole network is sure of. Decoding stays in float32, as half precision cannot tell
# apart pixels beyond 2048, and so do the convolutions before it in a file of 8 bits.


class Loss(NamedTuple):
    """Differences to the whole network's boxes, of those it is sure of."""

    num_boxes: int
    """Raw boxes, before NMS."""
    sure: float
    """Objectness from which on a box counts."""
    median_px: float
    largest_px: float
    largest_score: float

    def text(self) -> str:
        if not self.num_boxes:
            return f"no raw box above {self.sure:g} in these pictures, so its loss is not known"
        return (
            f"{self.num_boxes} raw boxes above {self.sure:g}: {self.median_px:.2g} px apart (median), at most "
            f"{self.largest_px:.2g} px, {self.largest_score:.2g} of a score"
        )


def smaller(probe: Model, precision: Precision, inputs: Sequence[np.ndarray], tail: Tail) -> Model:
    """The model in another precision; ranges of int8 come from the inputs."""
    model = runnable(probe, tail)
    if precision == "float16":
        less = in_float16_up_to_last_convolutions(model)
    else:
        less = in_int8(model, inputs, input_name=INPUT, kept=last_convolutions(model))
    return with_plugin(less, probe, tail)


def loss_of(model: Model, probe: Model, inputs: Sequence[np.ndarray], options: ExportOptions) -> Loss | None:
    """What became of the boxes; None for a file of raw maps."""
    if options.form == "raw":
        return None
    tail = tail_for(options)
    whole, less = (np.concatenate([each.reshape(-1, each.shape[2]) for each in decoded_by(one, inputs, tail)])
                   for one in (probe, model))  # fmt: skip
    sure = whole[:, 4] > options.conf_thres
    apart = np.abs(whole - less)[sure]
    if not len(apart):
        return Loss(0, options.conf_thres, 0.0, 0.0, 0.0)
    boxes_px = apart[:, :4].max(1)
    return Loss(
        len(apart), options.conf_thres, float(np.median(boxes_px)), float(boxes_px.max()), float(apart[:, 4:].max())
    )
