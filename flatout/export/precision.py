"""Smaller ONNX models: half precision, or convolutions with 8 bits. Their accuracy must be measured by the job."""

import tempfile
from collections.abc import Collection, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatout.export.onnx_model import Model, copy_of, require_package

Precision = Literal["float32", "float16", "int8"]


def in_float16(model: Model) -> Model:
    """A copy with weights and activations in float16; inputs and outputs stay float32."""
    made = require_package("onnxruntime.transformers.float16").convert_float_to_float16(
        copy_of(model), keep_io_types=True
    )
    _sort_topologically(made)
    return made


def in_float16_up_to_last_convolutions(model: Model) -> Model:
    """As `in_float16`, but everything after the last convolutions is computed in float32.

    The converter can exclude nodes as well, but it rounds the values that pass between them.
    """
    onnx = require_package("onnx")
    model = _with_initializers(model)
    end = {node.output[0] for node in _final_nodes(model) if node.op_type != "Conv"}
    tail = [node for node in model.graph.node if node.output[0] in end]
    body = copy_of(model)
    # The converter infers the types between nodes itself; those of the nodes after its part must not change.
    del body.graph.node[:], body.graph.output[:], body.graph.initializer[:], body.graph.value_info[:]
    body.graph.node.extend(node for node in model.graph.node if node.output[0] not in end)
    made = {name for node in body.graph.node for name in node.output}
    wanted = dict.fromkeys(name for node in tail for name in node.input if name in made)
    body.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in wanted)
    used = {name for node in body.graph.node for name in node.input}
    body.graph.initializer.extend(each for each in model.graph.initializer if each.name in used)
    result = in_float16(body)
    del result.graph.output[:]
    result.graph.output.extend(model.graph.output)
    _append(result, tail, list(model.graph.initializer))
    return result


def _with_initializers(model: Model) -> Model:
    """A copy with constants as initializers: a node belongs to one part of a graph, an initializer may serve both."""
    copied = copy_of(model)
    constants = [node for node in copied.graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"]
    for node in constants:
        copied.graph.initializer.append(node.attribute[0].t)
        copied.graph.initializer[-1].name = node.output[0]
        copied.graph.node.remove(node)
    return copied


def _append(model: Model, tail: list[Any], initializers: list[Any]) -> None:
    """Append nodes to a model, with constants of their own: those of the same name in it have another type by now."""
    constants = {each.name: each for each in initializers}
    added: set[str] = set()
    for node in tail:
        copied = copy_of(node)
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
    """A copy whose convolutions are quantized to 8 bits, with value ranges calibrated on the examples (whole inputs).

    The first convolution and the nodes `kept` are not quantized: their errors would affect everything that follows, or
    the result directly.
    """
    onnx, quantization = require_package("onnx"), require_package("onnxruntime.quantization")
    first = next(node.name for node in model.graph.node if node.op_type == "Conv")
    with tempfile.TemporaryDirectory() as folder:
        # Through files: the quantizer accepts them in every version.
        source, out = Path(folder, "float32.onnx"), Path(folder, "int8.onnx")
        onnx.save(model, str(source))
        prepared = Path(folder, "prepared.onnx")
        # Shape inference only: the optimisations would rename nodes.
        require_package("onnxruntime.quantization.shape_inference").quant_pre_process(
            str(source), str(prepared), skip_optimization=True, skip_symbolic_shape=True
        )
        quantization.quantize_static(
            str(prepared),
            str(out),
            _CalibrationReader({input_name: example} for example in examples),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            nodes_to_exclude=[first, *kept],
            per_channel=True,
        )
        return onnx.load(str(out))


def last_convolutions(model: Model) -> list[str]:
    """Names of the convolutions nearest to the outputs."""
    return [node.name for node in _final_nodes(model) if node.op_type == "Conv"]


def _final_nodes(model: Model) -> Iterator[Any]:
    """Nodes from the outputs back to the nearest convolutions, those included."""
    producer = {name: node for node in model.graph.node for name in node.output}
    pending = [output.name for output in model.graph.output]
    visited: set[str] = set()
    while pending:
        name = pending.pop()
        if name in visited or name not in producer:
            continue
        node = producer[name]
        visited.update(node.output)
        yield node
        if node.op_type != "Conv":
            pending.extend(node.input)


def _sort_topologically(model: Model) -> None:
    """Put every node after those it reads from, as the standard requires; the converter appends its casts."""
    nodes = [copy_of(node) for node in model.graph.node]
    producer = {name: position for position, node in enumerate(nodes) for name in node.output}
    needed = {
        position: [producer[name] for name in node.input if name in producer] for position, node in enumerate(nodes)
    }
    del model.graph.node[:]
    model.graph.node.extend(nodes[position] for position in TopologicalSorter(needed).static_order())


class _CalibrationReader:
    """Calibration inputs one at a time, as ONNX Runtime's quantizer reads them."""

    def __init__(self, inputs: Iterator[dict[str, np.ndarray]]) -> None:
        self._inputs = inputs

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._inputs, None)
