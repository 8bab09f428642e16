"""Buffers of variable size for each slot of a Loader, and tracking of the slots that are still in use.

    table     one row per slot: layout agreed on | offset and size of its body | offset and size of its request
    body      the tensors of one batch; every worker writes its rows in their final place
    request   written by the trainer: the keys to read, and their seed (batch_parts.py)

The buffers are in the ring's arena, so workers reach them through the file descriptor that they already have. The
trainer enlarges a buffer while its slot is idle; workers map it on first access.

A slot is in use as long as the user keeps a tensor of its batch or a slice of one, or a copy to the GPU is in progress.
"""

import logging
import os
import weakref
from collections.abc import Iterable

import numpy as np
import torch

from flatout.feed.ring import Arena, KernelLock

logger = logging.getLogger(__name__)

UNDECIDED = 0

TABLE_DTYPE = np.dtype(
    [(name, np.int64) for name in ("layout", "body_offset", "body_bytes", "request_offset", "request_bytes")]
)


class SlotBuffers:
    """One process's view of the buffers of all slots."""

    def __init__(self, arena: Arena, table_offset: int, num_slots: int) -> None:
        self.table_offset = table_offset
        self._arena = arena
        self._table = arena.extent(table_offset, num_slots * TABLE_DTYPE.itemsize).view(TABLE_DTYPE)
        self._lock = KernelLock(arena.fd)

    @classmethod
    def create(cls, arena: Arena, num_slots: int) -> "SlotBuffers":
        """New buffers, all of them empty."""
        return cls(arena, arena.grow(num_slots * TABLE_DTYPE.itemsize), num_slots)

    # Called by the trainer, while the slot is not in use

    def ensure_body(self, slot: int, nbytes: int) -> bool:
        """Make sure that the body has at least `nbytes`; returns whether a new body was allocated."""
        return self._enlarge(slot, "body", nbytes)

    def write_request(self, slot: int, request: bytes) -> None:
        self._enlarge(slot, "request", len(request))
        self._bytes(slot, "request")[: len(request)] = np.frombuffer(request, np.uint8)
        self._table[slot]["layout"] = UNDECIDED

    # Called by both

    def body(self, slot: int) -> np.ndarray:
        """The slot's body, uint8 [n], n at least as large as requested last."""
        return self._bytes(slot, "body")

    def request(self, slot: int) -> np.ndarray:
        """Bytes that begin with the slot's request."""
        return self._bytes(slot, "request")

    # Called by workers

    def agree_on_layout(self, slot: int, layout: int) -> bool:
        """Whether this batch uses `layout`: the first caller decides for all workers."""
        with self._lock:
            row = self._table[slot]
            if row["layout"] == UNDECIDED:
                row["layout"] = layout
            return bool(row["layout"] == layout)

    def _bytes(self, slot: int, buffer: str) -> np.ndarray:
        offset, nbytes = int(self._table[slot][f"{buffer}_offset"]), int(self._table[slot][f"{buffer}_bytes"])
        return self._arena.extent(offset, nbytes) if nbytes else np.empty(0, np.uint8)

    def _enlarge(self, slot: int, buffer: str, nbytes: int) -> bool:
        row = self._table[slot]
        if nbytes <= row[f"{buffer}_bytes"]:
            return False
        offset = self._arena.grow(nbytes)
        if row[f"{buffer}_bytes"]:
            self._arena.discard(int(row[f"{buffer}_offset"]))
        row[f"{buffer}_offset"], row[f"{buffer}_bytes"] = offset, nbytes
        return True


class SlotRefs:
    """Which slots may be reused: those with no live tensor and no copy in progress."""

    def __init__(self, num_slots: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._owner = os.getpid()
        self._num_live = [0] * num_slots
        self._copies: list[list[torch.cuda.Event]] = [[] for _ in range(num_slots)]

    def add(self, slot: int, arrays: Iterable[np.ndarray]) -> None:
        """Mark the slot as in use until all of `arrays` are gone; tensors made from them keep them alive."""
        for array in arrays:
            self._num_live[slot] += 1
            weakref.finalize(array, self._release, slot).atexit = False

    def is_free(self, slot: int) -> bool:
        """Whether the slot has no live arrays, and no copy from it is in progress."""
        if self._num_live[slot] or not all(event.query() for event in self._copies[slot]):
            return False
        self._copies[slot].clear()
        return True

    @property
    def num_in_use(self) -> int:
        return sum(not self.is_free(slot) for slot in range(len(self._num_live)))

    def _release(self, slot: int) -> None:
        self._num_live[slot] -= 1
        # Not in a child that was forked in the meantime: CUDA does not work there.
        if self._pinned and self._num_live[slot] == 0 and os.getpid() == self._owner:
            # A tensor may be dropped while an asynchronous copy still reads it: that copy was queued on this stream or
            # on the default one.
            for stream in {torch.cuda.current_stream(), torch.cuda.default_stream()}:
                event = torch.cuda.Event()
                event.record(stream)
                self._copies[slot].append(event)


def pin(body: np.ndarray) -> None:
    """Pin a slot's body until the last view of it is gone."""
    memory = body.base  # the whole extent, which all views of it keep alive
    assert isinstance(memory, np.ndarray)
    address = memory.ctypes.data
    status = torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)
    if int(status) != 0:
        logger.warning(
            "A slot could not be pinned (%s): its batches are copied to pinned memory by the main process. "
            "Raise the locked-memory limit (ulimit -l).",
            status,
        )
        return
    # Runs before the memory is unmapped, because this array is freed first.
    weakref.finalize(memory, _unpin, address, os.getpid()).atexit = False


def _unpin(address: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, where CUDA does not work
        torch.cuda.cudart().cudaHostUnregister(address)
