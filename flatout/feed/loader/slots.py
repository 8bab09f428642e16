"""Two areas per slot whose size only the data knows: what is to be read, and room for the batch itself.

    table   one row per slot: layout agreed on | where its body lies | where its order lies
    body    the tensors of one batch; every worker writes its rows in their final place
    order   written by the trainer: which samples, by which seed (batch_parts.py)

They live in the ring's arena, so workers reach them through the descriptor they have anyway. The
trainer enlarges an area while nobody works on its slot; workers map it when they first look.

Who still looks at a slot? Tensors that a user keeps, slices of them, copies to the GPU under way.
"""

import logging
import os
import weakref
from collections.abc import Iterable

import numpy as np
import torch

from flatout.feed.ring import Arena, KernelLock, pack

UNDECIDED = 0

TABLE_DTYPE = np.dtype(
    [(name, np.int64) for name in ("layout", "body_offset", "body_bytes", "order_offset", "order_bytes")]
)


class Areas:
    """The areas of all slots, as seen by one process."""

    def __init__(self, arena: Arena, table_offset: int, num_slots: int) -> None:
        self.table_offset = table_offset
        self._arena = arena
        layout = pack([("table", TABLE_DTYPE, (num_slots,))])
        self._table = layout.views(arena.extent(table_offset, layout.nbytes))["table"]
        self._lock = KernelLock(arena.fd)

    @classmethod
    def create(cls, arena: Arena, num_slots: int) -> "Areas":
        """New areas, all of them empty."""
        return cls(arena, arena.grow(pack([("table", TABLE_DTYPE, (num_slots,))]).nbytes), num_slots)

    # The trainer's side; nobody may work on the slot or look at it.

    def provide_body(self, slot: int, nbytes: int) -> bool:
        """Make room for a batch of `nbytes`; says whether the body is a new one."""
        return self._enlarge(slot, "body", nbytes)

    def write_order(self, slot: int, order: bytes) -> None:
        self._enlarge(slot, "order", len(order))
        self._bytes(slot, "order")[: len(order)] = np.frombuffer(order, np.uint8)
        self._table[slot]["layout"] = UNDECIDED

    # Both sides.

    def body(self, slot: int) -> np.ndarray:
        """Bytes [n] of the slot's body, n as last provided or a little more."""
        return self._bytes(slot, "body")

    def order(self, slot: int) -> np.ndarray:
        """Bytes that begin with the slot's order."""
        return self._bytes(slot, "order")

    # The workers' side.

    def agree(self, slot: int, layout: int) -> bool:
        """Whether this batch is laid out as `layout` says: yes to the first who asks, and to all who say the same."""
        with self._lock:
            row = self._table[slot]
            if row["layout"] == UNDECIDED:
                row["layout"] = layout
            return bool(row["layout"] == layout)

    def _bytes(self, slot: int, area: str) -> np.ndarray:
        offset, nbytes = int(self._table[slot][f"{area}_offset"]), int(self._table[slot][f"{area}_bytes"])
        return self._arena.extent(offset, nbytes) if nbytes else np.empty(0, np.uint8)

    def _enlarge(self, slot: int, area: str, nbytes: int) -> bool:
        row = self._table[slot]
        if nbytes <= row[f"{area}_bytes"]:
            return False
        offset = self._arena.grow(nbytes)
        if row[f"{area}_bytes"]:
            self._arena.discard(int(row[f"{area}_offset"]))
        row[f"{area}_offset"], row[f"{area}_bytes"] = offset, nbytes
        return True


logger = logging.getLogger(__name__)


class _Hold(weakref.ref[np.ndarray]):
    """A weak reference that knows its slot, told apart by identity: arrays cannot be hashed."""

    slot: int
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Holds:
    """Counts, for each slot, the arrays under the tensors that were handed out and still live."""

    def __init__(self, num_slots: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._owner = os.getpid()
        self._live = [0] * num_slots
        self._refs: set[_Hold] = set()
        self._copies: list[list[torch.cuda.Event]] = [[] for _ in range(num_slots)]

    def hold(self, slot: int, arrays: Iterable[np.ndarray]) -> None:
        """The slot is in use until all of `arrays` are gone; tensors made of them keep them alive."""
        for array in arrays:
            hold = _Hold(array, self._let_go)
            hold.slot = slot
            self._refs.add(hold)
            self._live[slot] += 1

    def is_free(self, slot: int) -> bool:
        """Whether nobody looks at the slot, and no copy from it is under way."""
        if self._live[slot] or not all(event.query() for event in self._copies[slot]):
            return False
        self._copies[slot].clear()
        return True

    @property
    def num_held(self) -> int:
        return sum(not self.is_free(slot) for slot in range(len(self._live)))

    def _let_go(self, hold: _Hold) -> None:
        slot = hold.slot
        self._refs.remove(hold)
        self._live[slot] -= 1
        # Not in a child that was forked meanwhile: CUDA does not work there.
        if self._pinned and self._live[slot] == 0 and os.getpid() == self._owner:
            # A tensor may be dropped while its asynchronous copy still reads: the copy was queued on this
            # stream or on the default one.
            for stream in {torch.cuda.current_stream(), torch.cuda.default_stream()}:
                event = torch.cuda.Event()
                event.record(stream)
                self._copies[slot].append(event)


# Page-locked memory for batches that go to a GPU.


def pin(body: np.ndarray) -> None:
    """Register a slot's body with CUDA, until the last view of it is gone."""
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
    # Before the memory is unmapped: the array under all views dies first.
    weakref.finalize(memory, _unpin, address, os.getpid()).atexit = False


def _unpin(address: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, where CUDA does not work
        torch.cuda.cudart().cudaHostUnregister(address)
