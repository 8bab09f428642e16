"""Weights in safetensors files: the state for inference, with the model config and class names as metadata.

Written by the safetensors library. Read here, because the library maps the file into memory: a file that shrinks
later would then end the program. The format is eight bytes of length, a JSON header, and the tensors' bytes.

The front door: weights from any file, told apart by content.
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
    Budget,
    PlainReader,
    Refusal,
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
    replacing,
    sections_of,
)
from flatout.yolo.weights.legacy import legacy_allowlist, weights_from_legacy
from flatout.yolo.weights.weights import State, Weights, checked_state, checked_weights, weights_from

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


def save_safetensors(path: str | Path, weights: Weights) -> None:
    """Export the state for inference, whole or not at all; training state does not go into safetensors."""
    state = _separate(weights.for_inference())
    described = {name: json.dumps(getattr(weights, name)) for name in _FIELDS}
    # The library sorts tensors by size of element; the order of a state_dict is kept here.
    described |= {"schema": str(SCHEMA), "keys": json.dumps(list(state))}
    metadata = {"format": "pt"} | {f"flatout.{name}": text for name, text in described.items()}
    content = safetensors.torch.save(state, metadata)
    with replacing(Path(path), needed_bytes=len(content)) as sink:
        sink.write(content)


def weights_from_safetensors(file: BinaryIO) -> Weights:
    """Weights from a safetensors file of ours or anybody's; a Refusal says what is wrong with it."""
    header, data_offset = _read_header(file)
    described = _described(header.pop("__metadata__", {}))
    state = _read_tensors(file, header, data_offset)
    keys = described.get("keys")
    if isinstance(keys, list) and all(type(key) is str for key in keys) and sorted(keys) == sorted(state):
        state = {key: state[key] for key in keys}
    return checked_weights(checked_state(state, "state"), None, described, "exported", "safetensors")


def _separate(state: State) -> State:
    """Contiguous tensors that share no memory, which the library demands."""
    separate: State = {}
    seen: set[int] = set()
    for key, tensor in state.items():
        tensor = compact(tensor).contiguous()
        separate[key] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return separate


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header and the offset of the bytes behind it."""
    size = os.fstat(file.fileno()).st_size
    nbytes = int.from_bytes(read_at(file.fileno(), 8, 0), "little")
    if nbytes > min(MAX_HEADER_BYTES, size - 8):
        raise Refusal(f"claims a safetensors header of {nbytes:,} bytes in a file of {size:,}. {AGAIN}")
    header = _parse(read_at(file.fileno(), nbytes, 8), "header")
    if not isinstance(header, dict):
        raise Refusal(f"its safetensors header is no table. {AGAIN}")
    return header, 8 + nbytes


def _described(metadata: object) -> dict[str, object]:
    """Our entries of the metadata; files of others have none, and that is fine."""
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Refusal(f"its safetensors metadata is not text. {AGAIN}")
    schema = metadata.get("flatout.schema")
    if schema is None:
        return {}
    if schema != str(SCHEMA):
        raise Refusal(f"was written by another flatout (schema {quoted(schema)}; this one reads {SCHEMA}). Update it.")
    reader = PlainReader()
    names = [name for name in (*_FIELDS, "keys") if f"flatout.{name}" in metadata]
    return {name: reader.plain(_parse(metadata[f"flatout.{name}"], name), name) for name in names}


def _parse(text: str | bytes, what: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _table(pairs, what))
    except (ValueError, RecursionError):
        raise Refusal(f"its safetensors {what} is not valid JSON. {AGAIN}") from None


def _table(pairs: list[tuple[str, object]], what: str) -> dict[str, object]:
    """A JSON object whose keys are all different; which of two equal ones counts would be up to the reader."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise Refusal(f"its safetensors {what} has two entries called {quoted(twice)}. {AGAIN}")
    return table


def _read_tensors(file: BinaryIO, header: Mapping[str, Any], data_offset: int) -> State:
    Budget(MAX_TENSORS, "tensors").spend(len(header))
    data_bytes = os.fstat(file.fileno()).st_size - data_offset
    places = sorted((_place(key, entry) for key, entry in header.items()), key=lambda place: place[1:3])
    state, free_from = {}, 0
    for key, begin, end, dtype, shape in places:
        if not free_from <= begin <= end <= data_bytes:
            raise Refusal(f"its tensor {quoted(key)} overlaps another one or lies outside the file. {AGAIN}")
        state[key] = _read_tensor(file, data_offset + begin, dtype, shape)
        free_from = end
    return state


def _place(key: str, entry: object) -> tuple[str, int, int, torch.dtype, list[int]]:
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
    raise Refusal(f"its tensor {quoted(key)} has a type, shape or place that do not fit together. {AGAIN}")


def _read_tensor(file: BinaryIO, offset: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    stored = allocate(math.prod(shape) * dtype.itemsize)
    read_into(file.fileno(), stored.numpy().data, offset)
    return (stored.clamp_(max=1) if dtype == torch.bool else stored).view(dtype).view(shape)


def read_weights(path: str | Path) -> Weights:
    """The weights in a legacy .pt, a .pt of ours or a safetensors file, on the CPU, as stored.

    Nothing in the file is run, whoever wrote it. CheckpointError says in one line why a file is not read.
    """
    with reading(path) as file:
        if file_kind(file) == "safetensors":
            return weights_from_safetensors(file)
        # A file that claims to be ours is read with the same suspicion; placeholders do not pass as plain data.
        objects = read_objects(file, legacy_allowlist)
        return weights_from(sections_of(objects)) if is_container(objects) else weights_from_legacy(objects)
