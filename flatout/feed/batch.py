"""The host batch that a feed yields, and how ragged rows of many workers become one array.

Dimension key:  B samples of a batch   T rows of all samples   W row width   N items   D dimensions of an item
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from flatout.feed.ring import Layout, Ring, Task, pack
from flatout.feed.source import Rows

Array = TypeVar("Array")


@dataclass(frozen=True)
class StepBatch(Generic[Array]):
    """One rank's share of a step, B samples, with its fields on the host or on a device."""

    epoch: int
    step: int
    num_valid: int
    """Number of rows that are not padding: rows from here on repeat samples to fill a padded last batch."""

    indices: np.ndarray
    """int64 [B], sample indices (substitutes included)."""

    positions: np.ndarray
    """int64 [B], positions in the epoch's order."""

    fields: Mapping[str, Array]
    """Field -> [B, *shape of this step]; Rows -> [T, width], the rows of all samples one after another."""

    counts: Mapping[str, np.ndarray]
    """Rows field -> int32 [B], rows per sample; they add up to T."""

    def __getitem__(self, name: str) -> Array:
        return self.fields[name]

    def __len__(self) -> int:
        return len(self.indices)


class Batch(StepBatch[np.ndarray]):
    """A batch on the host.

    Borrowed: every array is a view of a slot that is overwritten after the next `next()`. Use `copy()` to keep one.
    """

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.fields.values())

    def copy(self) -> "Batch":
        """A batch that owns its arrays."""
        return copy.deepcopy(self)


# Ragged rows: from many workers into one array in batch order.
#
# Workers finish in any order and do not know how many rows come before theirs. Each writes the rows of its micro-batch
# into the slot's scratch, wherever there is room, and records the offset; when the batch is complete, the parent
# copies these parts, a few kilobytes each, into one buffer in batch order.


def rows_layout(fields: Mapping[str, Rows], num_rows: Mapping[str, int]) -> Layout:
    """The layout of all ragged fields in one block of memory."""
    return pack([(name, field.dtype, (num_rows[name], field.width)) for name, field in fields.items()])


def hand_over(ring: Ring, task: Task, taken: Mapping[str, Sequence[np.ndarray]]) -> int:
    """Copy a task's rows, one array per sample, to the slot's scratch.

    Returns the bytes needed if they do not fit, else 0.
    """
    slot, fields = ring.slots[task.slot], ring.spec.rows_fields
    layout = rows_layout(fields, {name: sum(map(len, taken[name])) for name in fields})
    offset = _reserve(ring, task, layout.nbytes)
    if offset is None:
        return layout.nbytes
    views = layout.views(ring.arena.bytes_at(offset, layout.nbytes))
    for number, name in enumerate(fields):
        np.concatenate(taken[name], out=views[name])
        slot.counts[name][task.begin : task.end] = list(map(len, taken[name]))
        slot.rows_at[ring.micro_batch_of(task), number] = offset + layout.parts[name][0]
    return 0


def gather_rows(ring: Ring, slot_number: int, buffer: "RowsBuffer") -> dict[str, np.ndarray]:
    """Rows [T, W] of each ragged field of a complete batch, in batch order, as views of `buffer`."""
    slot, fields = ring.slots[slot_number], ring.spec.rows_fields
    counts = {name: slot.counts[name][: slot.num_rows] for name in fields}
    layout = rows_layout(fields, {name: int(counts[name].sum()) for name in fields})
    views = layout.views(buffer.at_least(layout.nbytes))
    begins = np.arange(0, slot.num_rows, ring.spec.micro_batch)
    for number, (name, field) in enumerate(fields.items()):
        end = 0
        for piece, num_rows in enumerate(np.add.reduceat(counts[name], begins).tolist() if len(begins) else []):
            memory = ring.arena.bytes_at(int(slot.rows_at[piece, number]), num_rows * field.row_bytes)
            views[name][end : end + num_rows] = memory.view(field.dtype).reshape(num_rows, field.width)
            end += num_rows
    return views


class RowsBuffer:
    """Memory for the gathered rows of one slot; grows as batches need more."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def at_least(self, nbytes: int) -> np.ndarray:
        if len(self._memory) < nbytes:
            self._memory = self.allocate(nbytes + nbytes // 4)
        return self._memory

    def allocate(self, nbytes: int) -> np.ndarray:
        """New memory, uint8 [nbytes]; the copy to the GPU overrides this to pin it."""
        return np.empty(nbytes, np.uint8)


def _reserve(ring: Ring, task: Task, nbytes: int) -> int | None:
    if not task.spill_bytes:
        return ring.reserve(task.slot, nbytes)
    ring.arena.extent(task.spill_offset, task.spill_bytes)
    return task.spill_offset if nbytes <= task.spill_bytes else None


# Decoded items by number


class Arrays(Protocol):
    """Decoded items that are cheap to access: a list of arrays, or a Store."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


@runtime_checkable
class ShapedArrays(Arrays, Protocol):
    """Items of one dtype and number of dimensions that are made on access, but whose shapes are known in advance."""

    dtype: np.dtype
    shapes_ND: np.ndarray
    """int64 [N, D], one row per item."""
