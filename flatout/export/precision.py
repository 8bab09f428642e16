"""Smaller ONNX models: half precision, or convolutions of 8 bits. They are as good as a measurement says."""

import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatout.export.onnx_model import Model, need

Precision = Literal["float32", "float16", "int8"]


def in_float16(model: Model) -> Model:
    """A copy with weights and activations in float16; inputs and outputs stay float32."""
    made = need("onnxruntime.transformers.float16").convert_float_to_float16(_copy(model), keep_io_types=True)
    _sort(made)
    return made


def in_float16_up_to_last_convolutions(model: Model) -> Model:
    """As `in_float16`, but what is computed from the last convolutions' outputs is computed in float32.

    The converter can leave nodes out, too, but rounds what goes from one of them to the next.
    """
    onnx = need("onnx")
    model = _with_initializers(model)
    end = {node.output[0] for node in _end_of(model) if node.op_type != "Conv"}
    tail = [node for node in model.graph.node if node.output[0] in end]
    body = _copy(model)
    # The converter infers the types between nodes itself; those behind its part must not be touched.
    del body.graph.node[:], body.graph.output[:], body.graph.initializer[:], body.graph.value_info[:]
    body.graph.node.extend(node for node in model.graph.node if node.output[0] not in end)
    made = {name for node in body.graph.node for name in node.output}
    wanted = dict.fromkeys(name for node in tail for name in node.input if name in made)
    body.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in wanted)
    used = {name for node in body.graph.node for name in node.input}
    body.graph.initializer.extend(each for each in model.graph.initializer if each.name in used)
    whole = in_float16(body)
    del whole.graph.output[:]
    whole.graph.output.extend(model.graph.output)
    _append(whole, tail, list(model.graph.initializer))
    return whole


def _with_initializers(model: Model) -> Model:
    """A copy whose constants are no nodes: a node belongs to one part of a graph, a constant may serve both."""
    copied = _copy(model)
    constants = [node for node in copied.graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"]
    for node in constants:
        copied.graph.initializer.append(node.attribute[0].t)
        copied.graph.initializer[-1].name = node.output[0]
        copied.graph.node.remove(node)
    return copied


def _append(model: Model, tail: list[Any], initializers: list[Any]) -> None:
    """Put nodes behind a model, with constants of their own: those of the same name in it have another type by now."""
    constants = {each.name: each for each in initializers}
    added: set[str] = set()
    for node in tail:
        copied = _copy(node)
        for position, name in enumerate(node.input):
            if name not in constants:
                continue
            copied.input[position] = f"{name}/float32"
            if name not in added:
                added.add(name)
                model.graph.initializer.append(constants[name])
                model.graph.initializer[-1].name = f"{name}/float32"
        model.graph.node.append(copied)


def in_int8(model: Model, examples: Iterable[np.ndarray], *, input_name: str, kept: Collection[str] = ()) -> Model:
    """A copy whose convolutions have 8 bits, with the ranges of values that the examples (whole inputs) showed.

    The first convolution and the nodes `kept` stay as they are: their errors would go straight into everything, or
    straight into the answer.
    """
    onnx, quantization = need("onnx"), need("onnxruntime.quantization")
    first = next(node.name for node in model.graph.node if node.op_type == "Conv")
    with tempfile.TemporaryDirectory() as folder:
        # By way of files: that is what the quantizer takes in every version.
        source, out = Path(folder, "whole.onnx"), Path(folder, "int8.onnx")
        onnx.save(model, str(source))
        prepared = Path(folder, "prepared.onnx")
        # Shapes only: its optimisations rename nodes.
        need("onnxruntime.quantization.shape_inference").quant_pre_process(
            str(source), str(prepared), skip_optimization=True, skip_symbolic_shape=True
        )
        quantization.quantize_static(
            str(prepared),
            str(out),
            _Examples({input_name: example} for example in examples),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            nodes_to_exclude=[first, *kept],
            per_channel=True,
        )
        return onnx.load(str(out))


def last_convolutions(model: Model) -> list[str]:
    """Names of the convolutions that nothing but other kinds of nodes follows."""
    return [node.name for node in _end_of(model) if node.op_type == "Conv"]


def _end_of(model: Model) -> Iterator[Any]:
    """Nodes from the outputs back to the nearest convolutions, those included."""
    maker = {name: node for node in model.graph.node for name in node.output}
    waiting = [output.name for output in model.graph.output]
    met: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in met or name not in maker:
            continue
        node = maker[name]
        met.update(node.output)
        yield node
        if node.op_type != "Conv":
            waiting.extend(node.input)


def _sort(model: Model) -> None:
    """Every node behind those it reads from, as the standard wants it; the converter puts its casts at the end."""
    nodes = [_copy(node) for node in model.graph.node]
    maker = {name: position for position, node in enumerate(nodes) for name in node.output}
    done: dict[int, None] = {}
    for start in range(len(nodes)):
        waiting = [start]
        while waiting:
            position = waiting[-1]
            needed = {maker[name] for name in nodes[position].input if name in maker} - done.keys()
            if needed:
                waiting.extend(needed)
            else:
                done[position] = None
                waiting.pop()
    del model.graph.node[:]
    model.graph.node.extend(nodes[position] for position in done)


def _copy(message: Any) -> Any:
    """Of a model or a node."""
    (copied := type(message)()).CopyFrom(message)
    return copied


class _Examples:
    """Inputs one at a time, as ONNX Runtime asks for them."""

    def __init__(self, inputs: Iterator[dict[str, np.ndarray]]) -> None:
        self._inputs = inputs

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._inputs, None)
