"""Container files, our own format: a dict of plain values and tensors that torch.load(weights_only=True) reads too.

    {"flatout": {"schema": 1, "digest": "sha256", "versions": {...}}, "<section>": ..., "<section>": ...}

The content of a section (weights, the state of a training) is up to its writer. Values are None, bool, int, float, str,
list, tuple, dict with str or int keys, and tensors.
"""

import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatout.clock import machine
from flatout.safefiles.archive import (
    AGAIN,
    ALGORITHM,
    DAMAGED,
    SUSPECT,
    YOURS,
    DigestSink,
    Refusal,
    WorkLimit,
    has_digest,
    quoted,
)
from flatout.safefiles.atomic import replacing
from flatout.safefiles.numpy_values import numpy_names
from flatout.safefiles.open_file import file_kind, read_objects, reading
from flatout.safefiles.unpickle import Allowlist, Built, Name, plain_allowlist, plain_names

# Plain trees
#
# The unpickler may return cycles, or a dozen nested lists that expand to a billion items. The rest of the program gets
# a tree of separate containers of limited size instead, which is safe to walk, copy and print.

MAX_DEPTH = 64
MAX_VALUES = 500_000
MAX_OVERLAP = 4
"""Most bytes that all views in a set of tensors may span, as a multiple of their storages; tied weights overlap."""


class PlainReader:
    """Copies objects of one file into plain trees, within one budget for all of them."""

    def __init__(self) -> None:
        self._budget = WorkLimit(MAX_VALUES, "values")
        self._tensors: list[Tensor] = []

    def plain(self, value: object, where: str) -> object:
        """A copy that consists of None, bool, int, float, str, bytes, list, tuple, dict, and detached tensors, which
        share memory with the originals.

        `where` names the value in a Refusal, such as "config".
        """
        self._tensors.clear()
        copied = self._copy(value, where, depth=0)
        _check_overlap(self._tensors, where)
        return copied

    def _copy(self, value: object, where: str, depth: int) -> object:
        self._budget.spend(1)
        if depth > MAX_DEPTH:
            raise Refusal(f"its {where} is nested deeper than {MAX_DEPTH} levels or contains itself. {SUSPECT}")
        if isinstance(value, str | bytes):
            # A long text that is repeated costs nothing here, but a lot wherever it is printed.
            self._budget.spend(len(value) // 16)
            return _printable(value, where)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Tensor):
            self._tensors.append(value)
            return value.detach()
        if isinstance(value, dict):
            # Keys count as well; the unpickler allows only plain ones.
            return {self._copy(key, where, depth): self._copy(item, where, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, where, depth + 1) for item in value)
        if isinstance(value, Built):
            return self._copy(value.plain(), where, depth + 1)
        kind = value.text if isinstance(value, Name) else type(value).__name__
        raise Refusal(f"its {where} holds a {quoted(kind)}, which is not plain data. {YOURS}")


def _printable(value: str | bytes, where: str) -> str | bytes:
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        raise Refusal(f"its {where} holds half of a surrogate pair, which cannot be printed. {DAMAGED}") from None
    return value


def _check_overlap(tensors: Iterable[Tensor], where: str) -> None:
    """Refuse tensors that overlap so much that copying them would need many times the file's size."""
    storage_bytes: dict[int, int] = {}
    view_bytes = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storage_bytes[storage.data_ptr()] = storage.nbytes()
        view_bytes += tensor.nbytes
    if view_bytes > MAX_OVERLAP * sum(storage_bytes.values()):
        raise Refusal(f"the tensors of its {where} overlap far more than those of a network. {SUSPECT}")


# Container files

SCHEMA = 1
_ENTRY_BYTES = 512
"""Largest overhead of a value or tensor in the file."""


def on_host(sections: Mapping[str, object]) -> dict[str, object]:
    """A copy of sections for `write_container` to write later: changes of the original tensors do not affect it.

    Waits for the tensors' device. TypeError names a value that is not plain.
    """
    return {name: _storable(section, name, copies=True) for name, section in sections.items()}


def write_container(path: str | Path, sections: Mapping[str, object]) -> None:
    """Write a container file atomically; ResourceError if it cannot be written.

    Tensors may be on any device; of a view only its own elements are written. TypeError names a value that is not
    plain.
    """
    if "flatout" in sections:
        raise ValueError(f"{path}: a section cannot be named 'flatout': that is the header. Rename it.")
    header = {"schema": SCHEMA, "digest": ALGORITHM, "versions": versions()}
    content: dict[str, object] = {"flatout": header}
    content |= {name: _storable(section, name) for name, section in sections.items()}
    with replacing(Path(path), needed_bytes=_bytes_of(content)) as sink:
        digesting = DigestSink(sink)
        torch.save(content, digesting)  # type: ignore[arg-type]
        digesting.finish()


def read_container(path: str | Path) -> dict[str, object]:
    """The sections of a container file; CheckpointError if it cannot be read or is not one."""
    with reading(path) as file:
        objects = read_objects(file, plain_allowlist) if file_kind(file) == "zip" else None
        if not is_container(objects):
            raise Refusal("was not written by flatout. Convert it first.")
        match objects:
            # Files of older versions have no digest, and do not say that there is one.
            case {"flatout": {"digest": _}} if not has_digest(file):
                raise Refusal(f"is damaged: the digest at its end is missing. {AGAIN}")
        return sections_of(objects)


def read_plain(path: str | Path) -> object:
    """Plain values and tensors of any file that torch.save wrote; CheckpointError if it cannot be read.

    Numbers of NumPy become those of Python, and small arrays nested lists.
    """
    with reading(path) as file:
        if file_kind(file) != "zip":
            raise Refusal("is not a zip as torch.save writes since torch 1.6. Save it again, or use another file.")
        objects = read_objects(file, lambda storages: Allowlist(plain_names(storages) | numpy_names()))
        return PlainReader().plain(objects, "content")


def is_container(objects: object) -> bool:
    """Whether objects from a torch file have the header of a container."""
    return isinstance(objects, dict) and "flatout" in objects


def sections_of(objects: object) -> dict[str, object]:
    """The sections of a container as plain trees; Refusal if it is damaged or of a newer version."""
    content = PlainReader().plain(objects, "content")
    match content:
        case {"flatout": {"schema": int(schema)}, **sections} if schema == SCHEMA:
            return {str(name): section for name, section in sections.items()}
        case {"flatout": {"schema": int(schema)}} if schema > SCHEMA:
            raise Refusal(f"was written by a newer flatout (schema {schema}; this one reads {SCHEMA}). Update flatout.")
    raise Refusal(f"claims to be written by flatout but has no schema number. {DAMAGED}")


def versions() -> dict[str, str]:
    """Versions recorded in a file, for later reference."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    return found | {"flatout": machine.package_version("flatout") or "not installed"}


def _storable(value: object, where: str, *, copies: bool = False) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        stored = compact(value)
        return stored.clone() if copies and stored.data_ptr() == value.data_ptr() else stored
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {key: _storable(item, f"{where}.{key}", copies=copies) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_storable(item, f"{where}[{index}]", copies=copies) for index, item in enumerate(value))
    kind = f"is a {type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping):
        kind = "has keys that are neither text nor whole numbers"
    raise TypeError(f"{where} {kind}; container files hold only plain values and tensors.")


def compact(tensor: Tensor) -> Tensor:
    """A plain tensor on the CPU that owns its storage; torch.save would write the whole storage of a small view."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _bytes_of(value: object) -> int:
    if isinstance(value, Tensor):
        return _ENTRY_BYTES + value.nbytes
    if isinstance(value, dict):
        return sum(_bytes_of(key) + _bytes_of(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    return 16 + 4 * len(value) if isinstance(value, str) else 16
