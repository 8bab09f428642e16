"""A torch module as an ONNX model in memory, and what is done to it before it becomes a file.

torch has two exporters. The one by torch.export is its default since 2.9: it needs one package more (onnxscript),
writes opset 18 and converts back from there, and describes a node of somebody else's (a TensorRT plugin) in onnxscript
only. The older one, by tracing, needs the package onnx alone, writes the asked-for opset directly and takes the
description of a foreign node from the function itself. It is deprecated but there in every torch from 2.6 to 2.13, and
its result is compared with the network anyway; so it is the one used here, and this file is the only one that knows.
"""

import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.safefiles import replacing

# The packages that an export needs and a training does not: imported when they are needed, or asked for by name.


def need(name: str) -> Any:
    """An optional package or one of its modules; ConfigError says how to get it."""
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(_missing(name)) from None


def refuse_missing(*names: str) -> None:
    """ConfigError now rather than after a minute of work; nothing is imported."""
    for name in names:
        if not is_there(name):
            raise ConfigError(_missing(name))


def is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # a module without a spec, or none at all in its place
        return False


def _missing(name: str) -> str:
    return f"Exporting needs the package {name.partition('.')[0]}: pip install onnx onnxruntime onnxslim"


Model: TypeAlias = Any
"""onnx.ModelProto."""
Axes = Mapping[str, Mapping[int, str]]
"""Of inputs and outputs: number of an axis -> its name, where its length is not fixed."""


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """Without torch's warnings that tracing is deprecated, that constants are constants, and that not all of them are
    computed: all known, and the result is compared with the network."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        # The same words as a FutureWarning, which Python shows: torch 2.15.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is (deprecated|not supported)")
        warnings.filterwarnings("ignore", message=".*might cause the trace to be incorrect")
        warnings.filterwarnings("ignore", message="Constant folding")
        yield


@torch.no_grad()
def traced(
    module: nn.Module,
    example: Tensor,
    *,
    input_name: str,
    output_names: Sequence[str],
    free_axes: Axes,
    opset: int,
) -> Model:
    """The model that computes what the module computes; the module is in evaluation mode, on the CPU."""
    onnx = need("onnx")
    with tempfile.TemporaryDirectory() as folder, quiet_tracing():
        path = str(Path(folder, "traced.onnx"))
        try:
            torch.onnx.export(
                module,
                (example,),
                path,
                input_names=[input_name],
                output_names=list(output_names),
                dynamic_axes={name: dict(axes) for name, axes in free_axes.items()} or None,
                opset_version=opset,
                dynamo=False,
            )
        except torch.onnx.errors.UnsupportedOperatorError as error:
            raise ConfigError(f"Opset {opset} is too old for this network: {error}") from None
        return onnx.load(path)


def simplified(model: Model) -> Model:
    """The same with constants computed and needless nodes gone."""
    return need("onnxslim").slim(model)


def state_facts(model: Model, facts: Mapping[str, str]) -> None:
    """Write what a user must know into the model's metadata."""
    need("onnx").helper.set_model_props(model, dict(facts))


def state_shapes(model: Model, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Say the shapes of outputs as people would: numbers, and names of free axes."""
    onnx = need("onnx")
    for output in model.graph.output:
        if output.name in shapes:
            dtype = output.type.tensor_type.elem_type
            output.CopyFrom(onnx.helper.make_tensor_value_info(output.name, dtype, list(shapes[output.name])))


def without_outputs(model: Model, names: Iterable[str]) -> Model:
    """A copy that does not give some outputs; every node stays."""
    copied = type(model)()
    copied.CopyFrom(model)
    dropped = set(names)
    for output in list(copied.graph.output):
        if output.name in dropped:
            copied.graph.output.remove(output)
    return copied


def opset_of(model: Model) -> int:
    """Version of the standard operators."""
    return next(int(each.version) for each in model.opset_import if each.domain in ("", "ai.onnx"))


def check(model: Model) -> None:
    """onnx's own checks; nodes of other domains are left to whoever runs them."""
    need("onnx").checker.check_model(model)


def save(model: Model, path: Path) -> int:
    """The file, whole or not at all; returns its bytes. ResourceError if there is no room."""
    content = model.SerializeToString()
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)
    return len(content)


# An ONNX model run by ONNX Runtime on the CPU.


class Session:
    """A loaded model: arrays in, arrays out by name."""

    def __init__(self, model: Any, *, threads: int = 0) -> None:
        """`model` is an onnx.ModelProto or the path of a file; 0 threads leaves the number to ONNX Runtime."""
        onnxruntime = need("onnxruntime")
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.log_severity_level = 3
        source = model.SerializeToString() if hasattr(model, "SerializeToString") else str(model)
        self._session = onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = self._session.run(None, dict(inputs))
        return dict(zip(self._outputs, found, strict=True))
