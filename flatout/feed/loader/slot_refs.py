"""Who still looks at a slot? Tensors that a user keeps, slices of them, copies to the GPU under way."""

import logging
import os
import weakref
from collections.abc import Iterable

import numpy as np
import torch

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
