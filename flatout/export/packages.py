"""The packages that an export needs and a training does not: imported when they are needed, or asked for by name."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from flatout.errors import ConfigError


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
