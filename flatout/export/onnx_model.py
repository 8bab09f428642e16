"""A torch module as an ONNX model: tracing, editing, saving, and running it in ONNX Runtime.

torch has two exporters. The one based on torch.export is its default since 2.9: it needs an additional package
(onnxscript), writes opset 18 and converts back from there, and can describe custom nodes (such as TensorRT plugins) in
onnxscript only. The older one, based on tracing, needs only the package onnx, writes the requested opset directly and
takes the description of a custom node from the function itself. It is deprecated but exists in every torch from 2.6 to
2.13, and its result is compared with the network anyway; so it is used here, and only this file depends on it.
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
from flatout.safefiles import write_file

# Optional packages, which an export needs and a training does not: imported when they are used


def require_package(name: str) -> Any:
    """Import an optional package or one of its modules. ConfigError with the install command if it is missing."""
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(_missing(name)) from None


def refuse_missing(*names: str) -> None:
    """ConfigError if one of these packages is missing; imports nothing. For a check before a long export."""
    for name in names:
        if not is_installed(name):
            raise ConfigError(_missing(name))


def is_installed(name: str) -> bool:
    """Whether a package can be found; imports nothing."""
    try:
        return find_spec(name) is not None
    except ValueError:  # sys.modules has a module without a spec, or None, under this name
        return False


INSTALLS = {"openvino": "onnx onnxruntime openvino", "ncnn": "ncnn pnnx", "pnnx": "ncnn pnnx"}
"""What to install for a package, where it is not that of ONNX."""


def _missing(name: str) -> str:
    package = name.partition(".")[0]
    return f"Exporting needs the package {package}: pip install {INSTALLS.get(package, 'onnx onnxruntime onnxslim')}"


# Model

Model: TypeAlias = Any
"""An onnx.ModelProto."""
Axes = Mapping[str, Mapping[int, str]]
"""Input or output -> {axis number: name} of its axes of variable length."""


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """Suppress torch's warnings that tracing is deprecated, that values become constants, and that not all constants
    are folded: they are expected, and the result is compared with the network."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        # torch 2.15 gives the same text as a FutureWarning, which Python shows by default.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is (deprecated|not supported)")
        warnings.filterwarnings("ignore", message=".*might cause the trace to be incorrect")
        warnings.filterwarnings("ignore", message="Constant folding")
        yield


@torch.no_grad()
def traced(
    module: nn.Module, examples: Mapping[str, Tensor], *, output_names: Sequence[str], free_axes: Axes, opset: int
) -> Model:
    """The ONNX model of a module, which must be in evaluation mode and on the CPU, from examples of its inputs by name.

    ConfigError if the opset is too old.
    """
    onnx = require_package("onnx")
    with tempfile.TemporaryDirectory() as folder, quiet_tracing():
        path = str(Path(folder, "traced.onnx"))
        try:
            torch.onnx.export(
                module,
                tuple(examples.values()),
                path,
                input_names=list(examples),
                output_names=list(output_names),
                dynamic_axes={name: dict(axes) for name, axes in free_axes.items()} or None,
                opset_version=opset,
                dynamo=False,
            )
        except torch.onnx.errors.UnsupportedOperatorError as error:
            raise ConfigError(
                f"Opset {opset} is too old for this network: {str(error).removesuffix('.')}. Use a newer one with "
                "--opset."
            ) from None
        return onnx.load(path)


def simplified(model: Model) -> Model:
    """The model with constants folded and redundant nodes removed."""
    return require_package("onnxslim").slim(model)


def set_metadata(model: Model, facts: Mapping[str, str]) -> None:
    """Set the metadata of a model, in place."""
    require_package("onnx").helper.set_model_props(model, dict(facts))


def set_output_shapes(model: Model, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Set the declared shapes of outputs, in place: numbers, and names of variable axes."""
    onnx = require_package("onnx")
    for output in model.graph.output:
        if output.name in shapes:
            dtype = output.type.tensor_type.elem_type
            output.CopyFrom(onnx.helper.make_tensor_value_info(output.name, dtype, list(shapes[output.name])))


def without_outputs(model: Model, names: Iterable[str]) -> Model:
    """A copy without some outputs; all nodes stay."""
    copied, dropped = copy_of(model), set(names)
    for output in list(copied.graph.output):
        if output.name in dropped:
            copied.graph.output.remove(output)
    return copied


def copy_of(message: Any) -> Any:
    """A copy of a model or a node."""
    (copied := type(message)()).CopyFrom(message)
    return copied


def opset_of(model: Model) -> int:
    """Opset version of the standard operators."""
    return next(int(each.version) for each in model.opset_import if each.domain in ("", "ai.onnx"))


def check(model: Model) -> None:
    """Run the checker of onnx, which skips nodes of custom domains."""
    require_package("onnx").checker.check_model(model)


def save(model: Model, path: Path) -> int:
    """Write the file, completely or not at all; returns its size in bytes. ResourceError if the disk is full."""
    content = model.SerializeToString()
    write_file(path, content)
    return len(content)


# Inference


class Session:
    """A model loaded by ONNX Runtime on the CPU: arrays in, arrays out by name."""

    def __init__(self, model: Any, *, threads: int = 0) -> None:
        """`model` is an onnx.ModelProto or the path of a file; with 0 threads, ONNX Runtime chooses their number."""
        onnxruntime = require_package("onnxruntime")
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.log_severity_level = 3
        source = model.SerializeToString() if hasattr(model, "SerializeToString") else str(model)
        self._session = onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = self._session.run(None, dict(inputs))
        return dict(zip(self._outputs, found, strict=True))
