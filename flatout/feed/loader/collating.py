"""From samples to a piece of a batch, in a worker: tensors into the body, the rest into a pickle.

Three ways: rows under torch's default collate; the parts of a (collate_fn, join_fn) pair; and a
whole batch made by a lone collate_fn.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from flatout.feed.loader.batch_parts import (
    Form,
    Head,
    Hole,
    Leaf,
    Piece,
    TensorHole,
    dump_with_holes,
    fingerprint,
    leaf_of,
    place,
    view,
    write_rows,
)

Shape = tuple[int, ...]


class Room(NamedTuple):
    """The part of a body that a micro-batch may write."""

    memory: np.ndarray
    """The whole body."""

    num_rows: int
    """Of the batch."""

    begin: int
    """First row of the micro-batch."""

    agree: Callable[[int], bool]
    """Whether the batch is laid out like this; see Areas.agree."""


def lay_rows(samples: Sequence[Any], room: Room) -> Piece:
    """What torch's default collate would do, with the rows written in their place."""
    parts: list[Sequence[Any]] = []

    def catch(values: Sequence[Any], *, collate_fn_map: object = None) -> Hole:
        parts.append(values)
        return Hole(len(parts) - 1, isinstance(values, tuple))

    # Torch's own walk through the containers, so that they come out as they do there.
    skeleton = collate(samples, collate_fn_map=dict.fromkeys(default_collate_fn_map, catch))
    found = [leaf_of(values) for values in parts]
    leaves = tuple(leaf if isinstance(leaf, Leaf) else None for leaf in found)
    paths = {hole.number: path for path, hole in _holes(skeleton, "")}
    in_place = [leaf for leaf in leaves if leaf is not None]
    placed = place(in_place, room.num_rows)
    if placed.nbytes > len(room.memory):
        return _carried(samples, _too_small(room), placed.nbytes)
    if not room.agree(fingerprint(in_place, repr(paths))):
        return _carried(samples, _text_of_change(found, paths), placed.nbytes)
    numbers = [number for number, leaf in enumerate(leaves) if leaf is not None]
    for leaf, offset, number in zip(in_place, placed.offsets, numbers, strict=True):
        rows = _rows(room, leaf, offset, len(samples))
        write_rows(leaf, parts[number], rows)
    told = tuple(
        f"sample{paths.get(number, '')} is carried by pickle: {why}"
        for number, why in enumerate(found)
        if isinstance(why, str)
    )
    head = Head(leaves, dump_with_holes(skeleton, _hole_or_none), told)
    carried = {number: list(parts[number]) for number, leaf in enumerate(leaves) if leaf is None}
    return Piece(Form.ROWS, pickle.dumps(head), pickle.dumps(carried), placed.nbytes)


def lay_part(part: Any, num_samples: int, room: Room) -> Piece:
    """A micro-batch made by the collate_fn of a pair: tensors with a row per sample go side by side."""

    def row_shape(shape: Shape) -> Shape | None:
        return shape[1:] if shape[:1] == (num_samples,) else None

    return _lay_collated(part, room, row_shape, num_samples)


def lay_whole(batch: Any, room: Room) -> Piece:
    """A batch made by a lone collate_fn: every tensor of it is the single row of a leaf."""
    return _lay_collated(batch, room._replace(num_rows=1, begin=0), lambda shape: shape, 1)


def _lay_collated(value: Any, room: Room, row_shape: Callable[[Shape], Shape | None], num_rows: int) -> Piece:
    leaves: list[Leaf] = []
    sources: list[Tensor | np.ndarray] = []
    holes: dict[int, TensorHole] = {}  # by id: a tensor that appears twice comes back as one
    kept: list[Any] = []  # or an id could be used again

    def hole_for(each: Any) -> TensorHole | None:
        if id(each) not in holes and isinstance(each, Tensor | np.ndarray):
            source, back = _in_memory_order(each)
            leaf = leaf_of([source])
            shape = row_shape(leaf.shape) if isinstance(leaf, Leaf) else None
            if shape is not None and isinstance(leaf, Leaf):
                holes[id(each)] = TensorHole(len(leaves), back)
                leaves.append(leaf._replace(shape=shape))
                sources.append(source)
                kept.append(each)
        return holes.get(id(each))

    pickled = dump_with_holes(value, hole_for)
    placed = place(leaves, room.num_rows)
    if placed.nbytes > len(room.memory):
        return _part_carried(value, _too_small(room), placed.nbytes)
    if not room.agree(fingerprint(leaves)):
        return _part_carried(value, "the parts of one batch differ in shape or dtype", placed.nbytes)
    for leaf, offset, source in zip(leaves, placed.offsets, sources, strict=True):
        rows = _rows(room, leaf, offset, num_rows)
        _copy(source, rows if rows.ndim == source.ndim else rows[0])
    return Piece(Form.PART, pickle.dumps(Head(tuple(leaves), b"", ())), pickled, placed.nbytes)


def _in_memory_order(value: Tensor | np.ndarray) -> tuple[Tensor | np.ndarray, tuple[int, ...]]:
    """The value with its dimensions as they lie in memory, and how to permute them back; () if they lie in order.

    So that a batch in channels_last, say, arrives in channels_last.
    """
    if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided or value.is_contiguous():
        return value, ()
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda dim: -strides[dim])
    permuted = value.permute(order)
    if not permuted.is_contiguous():
        return value, ()
    return permuted, tuple(order.index(dim) for dim in range(value.ndim))


def _copy(source: Tensor | np.ndarray, target: Tensor) -> None:
    if isinstance(source, Tensor):
        target.copy_(source)
    else:
        np.copyto(target.numpy(), source)


def _rows(room: Room, leaf: Leaf, offset: int, num_rows: int) -> Tensor:
    return view(room.memory, offset, leaf, room.num_rows)[0][room.begin : room.begin + num_rows]


def _too_small(room: Room) -> str:
    """What to say of a batch that does not fit; nothing while the first sample is still being read."""
    return "batches are larger than the room kept for them" if len(room.memory) else ""


def _carried(samples: Sequence[Any], why: str, body_bytes: int) -> Piece:
    told = (f"a batch is carried by pickle and collated by the trainer: {why}",) if why else ()
    head = Head((), b"", told)
    return Piece(Form.SAMPLES, pickle.dumps(head), pickle.dumps(list(samples)), body_bytes)


def _part_carried(value: Any, why: str, body_bytes: int) -> Piece:
    told = (f"what collate_fn made is carried by pickle: {why}",) if why else ()
    head = Head((), b"", told)
    return Piece(Form.PART, pickle.dumps(head), pickle.dumps(value), body_bytes)


def _hole_or_none(value: Any) -> Hole | None:
    return value if isinstance(value, Hole) else None


def _holes(value: Any, path: str) -> list[tuple[str, Hole]]:
    """Every hole of a collated skeleton, with the way to it: "['image']", "[1][0]"."""
    if isinstance(value, Hole):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [hole for key in value for hole in _holes(value[key], f"{path}[{key!r}]")]
    return [hole for number, each in enumerate(value) for hole in _holes(each, f"{path}[{number}]")]


def _text_of_change(found: Sequence[Leaf | str], paths: Mapping[int, str]) -> str:
    for number, leaf in enumerate(found):
        if isinstance(leaf, str) and "change" in leaf:
            return f"sample{paths.get(number, '')}: {leaf}"
    return "samples of one batch differ in structure, shape or dtype"
