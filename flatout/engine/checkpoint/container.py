"""Our own file: a dict of plain values and tensors that torch.load(weights_only=True) reads too.

    {"flatout": {"schema": 1, "digest": "sha256", "versions": {...}}, "<section>": ..., "<section>": ...}

Each section belongs to whoever wrote it (weights, the state of a training). Values are None, bool, int, float, str,
list, tuple, dict with str or int keys, and tensors.
"""

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatout.engine.checkpoint.atomic import replacing
from flatout.engine.checkpoint.digest import ALGORITHM, DigestSink, has_digest
from flatout.engine.checkpoint.opening import file_kind, reading
from flatout.engine.checkpoint.plain import PlainReader
from flatout.engine.checkpoint.refusal import AGAIN, DAMAGED, Refusal
from flatout.engine.checkpoint.torch_file import read_objects
from flatout.engine.checkpoint.vocabulary import plain_vocabulary

SCHEMA = 1
_ENTRY_BYTES = 512
"""What a value or tensor takes in the file beside its content, at most."""


def write_container(path: str | Path, sections: Mapping[str, object]) -> None:
    """Write a file of ours, whole or not at all; ResourceError if the disk cannot take it.

    Tensors are written from the device they are on, and only the elements they show. TypeError names a value that is
    not plain.
    """
    header = {"schema": SCHEMA, "digest": ALGORITHM, "versions": versions()}
    content: dict[str, object] = {"flatout": header}
    content |= {name: _storable(section, name) for name, section in sections.items()}
    with replacing(Path(path), needed_bytes=_bytes_of(content)) as sink:
        digesting = DigestSink(sink)
        torch.save(content, digesting)  # type: ignore[arg-type]
        digesting.finish()


def read_container(path: str | Path) -> dict[str, object]:
    """The sections of a file of ours; CheckpointError says why a file is not one."""
    with reading(path) as file:
        objects = read_objects(file, plain_vocabulary) if file_kind(file) == "zip" else None
        if not is_container(objects):
            raise Refusal("holds weights of another program. Convert them first.")
        if _promises_digest(objects) and not has_digest(file):
            raise Refusal(f"is damaged: the digest at its end is missing. {AGAIN}")
        return sections_of(objects)


def is_container(objects: object) -> bool:
    """Whether objects out of a torch file claim to be ours."""
    return isinstance(objects, dict) and "flatout" in objects


def sections_of(objects: object) -> dict[str, object]:
    """The checked sections of a container, plain trees; a Refusal says what is wrong with it."""
    content = PlainReader().plain(objects, "content")
    match content:
        case {"flatout": {"schema": int(schema)}, **sections} if schema == SCHEMA:
            return {str(name): section for name, section in sections.items()}
        case {"flatout": {"schema": int(schema)}} if schema > SCHEMA:
            raise Refusal(f"was written by a newer flatout (schema {schema}; this one reads {SCHEMA}). Update flatout.")
    raise Refusal(f"claims to be written by flatout but has no schema number. {DAMAGED}")


def _promises_digest(objects: object) -> bool:
    """Files that were written before there was one go without."""
    match objects:
        case {"flatout": {"digest": _}}:
            return True
    return False


def versions() -> dict[str, str]:
    """Versions that a file records, for those who wonder later."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    try:
        found["flatout"] = metadata.version("flatout")
    except metadata.PackageNotFoundError:
        found["flatout"] = "not installed"
    return found


def _storable(value: object, where: str) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return compact(value)
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {key: _storable(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_storable(item, f"{where}[{index}]") for index, item in enumerate(value))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(f"{where} is a {kind}; files of ours hold plain values and tensors only.")


def compact(tensor: Tensor) -> Tensor:
    """A plain tensor on the CPU; torch.save would write all of a storage for a view of a little of it."""
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
