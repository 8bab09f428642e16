"""Weights read from a file of any format, and safetensors files.

The format of a file is recognised by its content. A safetensors file has the state for inference, with the model config
and class names as metadata. It is written by the safetensors library, but read here, because the library maps the file
into memory, and the program would crash if the file shrank later. The format is eight bytes of length, a JSON header,
and the bytes of the tensors.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from torch import Tensor

from flatout.safefiles import (
    AGAIN,
    MAX_TENSORS,
    PlainReader,
    Refusal,
    WorkLimit,
    allocate,
    compact,
    file_kind,
    is_container,
    is_countable,
    quoted,
    read_at,
    read_into,
    read_objects,
    reading,
    sections_of,
    write_file,
)
from flatout.yolo.weights.legacy import legacy_allowlist, weights_from_legacy
from flatout.yolo.weights.weights import State, Weights, checked_state, checked_weights, weights_from


def read_weights(path: str | Path) -> Weights:
    """The weights in a legacy .pt, our own .pt or a safetensors file, on the CPU, as stored.

    Nothing in the file is ever run. CheckpointError says in one line why a file cannot be read.
    """
    with reading(path) as file:
        if file_kind(file) == "safetensors":
            return weights_from_safetensors(file)
        # A file that claims to be ours is not trusted either: placeholders do not pass as plain data.
        objects = read_objects(file, legacy_allowlist)
        return weights_from(sections_of(objects)) if is_container(objects) else weights_from_legacy(objects)


# safetensors

SCHEMA = 1
MAX_HEADER_BYTES = 8 << 20

_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_FIELDS = ("config", "names", "nc")
_OPTIONAL_FIELDS = ("tiles",)
"""Left out of a file whose weights do not have them."""


def save_safetensors(path: str | Path, weights: Weights) -> None:
    """Write the state for inference, completely or not at all; safetensors files have no training state."""
    state = _separate(weights.for_inference())
    names = [*_FIELDS, *(name for name in _OPTIONAL_FIELDS if getattr(weights, name) is not None)]
    own = {name: json.dumps(getattr(weights, name)) for name in names}
    # The library sorts tensors by element size, so the order of the state_dict is stored here.
    own |= {"schema": str(SCHEMA), "keys": json.dumps(list(state))}
    metadata = {"format": "pt"} | {f"flatout.{name}": text for name, text in own.items()}
    write_file(path, safetensors.torch.save(state, metadata))


def weights_from_safetensors(file: BinaryIO) -> Weights:
    """Weights from a safetensors file, also of other programs; Refusal says what is wrong with it."""
    header, data_offset = _read_header(file)
    own = _own_metadata(header.pop("__metadata__", {}))
    state = _read_tensors(file, header, data_offset)
    keys = own.get("keys")
    if isinstance(keys, list) and all(type(key) is str for key in keys) and sorted(keys) == sorted(state):
        state = {key: state[key] for key in keys}
    return checked_weights(checked_state(state, "state"), None, own, "exported", "safetensors")


def _separate(state: State) -> State:
    """Contiguous tensors that share no memory, as the library requires."""
    separate: State = {}
    seen: set[int] = set()
    for key, tensor in state.items():
        tensor = compact(tensor).contiguous()
        separate[key] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return separate


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header, and the offset of the bytes after it."""
    size = os.fstat(file.fileno()).st_size
    nbytes = int.from_bytes(read_at(file.fileno(), 8, 0), "little")
    if nbytes > min(MAX_HEADER_BYTES, size - 8):
        raise Refusal(f"claims a safetensors header of {nbytes:,} bytes in a file of {size:,}. {AGAIN}")
    header = _parse(read_at(file.fileno(), nbytes, 8), "header")
    if not isinstance(header, dict):
        raise Refusal(f"its safetensors header is not a table. {AGAIN}")
    return header, 8 + nbytes


def _own_metadata(metadata: object) -> dict[str, object]:
    """Our entries in the metadata; files of other programs have none."""
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Refusal(f"its safetensors metadata is not text. {AGAIN}")
    schema = metadata.get("flatout.schema")
    if schema is None:
        return {}
    if schema != str(SCHEMA):
        raise Refusal(
            f"was written by another flatout (schema {quoted(schema)}; this one reads {SCHEMA}). Update flatout."
        )
    reader = PlainReader()
    names = [name for name in (*_FIELDS, *_OPTIONAL_FIELDS, "keys") if f"flatout.{name}" in metadata]
    return {name: reader.plain(_parse(metadata[f"flatout.{name}"], name), name) for name in names}


def _parse(text: str | bytes, what: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique_keys(pairs, what))
    except (ValueError, RecursionError):
        raise Refusal(f"its safetensors {what} is not valid JSON. {AGAIN}") from None


def _unique_keys(pairs: list[tuple[str, object]], what: str) -> dict[str, object]:
    """A JSON object with unique keys; which of two equal keys counts would depend on the parser."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise Refusal(f"its safetensors {what} has two entries named {quoted(twice)}. {AGAIN}")
    return table


def _read_tensors(file: BinaryIO, header: Mapping[str, Any], data_offset: int) -> State:
    WorkLimit(MAX_TENSORS, "tensors").spend(len(header))
    data_bytes = os.fstat(file.fileno()).st_size - data_offset
    entries = sorted((_tensor_entry(key, entry) for key, entry in header.items()), key=lambda entry: entry[1:3])
    state, free_from = {}, 0
    for key, begin, end, dtype, shape in entries:
        if not free_from <= begin <= end <= data_bytes:
            raise Refusal(f"its tensor {quoted(key)} overlaps another one or is outside the file. {AGAIN}")
        state[key] = _read_tensor(file, data_offset + begin, dtype, shape)
        free_from = end
    return state


def _tensor_entry(key: str, entry: object) -> tuple[str, int, int, torch.dtype, list[int]]:
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            kind in _DTYPES
            and len(shape) <= 16
            and all(type(length) is int and 0 <= length < 1 << 40 for length in shape)
            and is_countable(shape)
            and 0 <= begin <= end
            and end - begin == math.prod(shape) * _DTYPES[kind].itemsize
        ):
            return key, begin, end, _DTYPES[kind], shape
        case {"dtype": str(kind)} if kind not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise Refusal(f"its tensor {quoted(key)} is of type {quoted(kind)}. Save it as one of {known}.")
    raise Refusal(f"its tensor {quoted(key)} has a type, shape and position that do not fit together. {AGAIN}")


def _read_tensor(file: BinaryIO, offset: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    stored = allocate(math.prod(shape) * dtype.itemsize)
    read_into(file.fileno(), stored.numpy().data, offset)
    return (stored.clamp_(max=1) if dtype == torch.bool else stored).view(dtype).view(shape)
