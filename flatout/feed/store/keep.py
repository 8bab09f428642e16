"""Who keeps decoded items while a run goes on: a whole store, the items used last, or nobody.

Three keepers with one face. Pickled into a worker, each finds its way back to the same memory (a whole store) or
begins an own one (the items used last).
"""

import logging
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from flatout.feed.store.file import HERE, UNREADABLE, StoreFile, StoreFileError
from flatout.feed.store.home import FdAddress

logger = logging.getLogger(__name__)

# Which items does a cache of limited size keep? The ones used last.
#
# Pure bookkeeping, for those who ask for it (`StoreConfig(policy="lru")`). Under a shuffled epoch that does not fit,
# an item is evicted before its turn comes again more often than not: room for half of the items hits 15 %, where a
# fixed resident half hits 50 % (bench/store.py).

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _Kept(NamedTuple, Generic[Value]):
    value: Value
    size: int


class Lru(Generic[Key, Value]):
    """Values by key, up to `budget` in all; sizes are in whatever unit the budget is: bytes, or 1 per item.

    Not for use from several threads at once.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self.hits = self.misses = self.evictions = self.rejected = 0
        self._kept: OrderedDict[Key, _Kept[Value]] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """The value, which becomes the newest; None if it is not here."""
        kept = self._kept.get(key)
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return kept.value

    def put(self, key: Key, value: Value, size: int = 1) -> list[Key]:
        """Keep a value as the newest; returns the keys that had to go for it, oldest first.

        One that is larger than the whole budget is rejected, and nothing goes for it.
        """
        if size > self.budget:
            self.rejected += 1
            return []
        if key in self._kept:
            self.used -= self._kept.pop(key).size
        evicted = []
        while self.used + size > self.budget:
            oldest, kept = self._kept.popitem(last=False)
            self.used -= kept.size
            evicted.append(oldest)
        self.evictions += len(evicted)
        self._kept[key] = _Kept(value, size)
        self.used += size
        return evicted

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[Key]:
        """Keys, oldest first."""
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


UNKNOWN, GOOD, DAMAGED = 0, 1, 2


class Keeper(Protocol):
    """Read-only arrays by index."""

    def get(self, index: int) -> np.ndarray | None:
        """The array, if it is kept."""

    def offer(self, index: int, array: np.ndarray) -> None:
        """An array that was not kept and had to be decoded."""

    def holds(self, index: int) -> bool: ...

    def count(self) -> tuple[int, int, int]:
        """Items that are kept, their bytes, and items that are known to be unreadable."""

    def close(self) -> None: ...


class Nobody:
    """Everything is decoded on every visit."""

    def get(self, index: int) -> np.ndarray | None:
        return None

    def offer(self, index: int, array: np.ndarray) -> None: ...

    def holds(self, index: int) -> bool:
        return False

    def count(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def close(self) -> None: ...


class Recent:
    """The items used last, in each process for itself."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._begin()

    def get(self, index: int) -> np.ndarray | None:
        if self._pid != os.getpid():  # forked: the lock may be held by a thread that is not here
            self._begin()
        with self._lock:
            return self._lru.get(index)

    def offer(self, index: int, array: np.ndarray) -> None:
        with self._lock:
            self._lru.put(index, array, array.nbytes)

    def holds(self, index: int) -> bool:
        return index in self._lru

    def count(self) -> tuple[int, int, int]:
        return len(self._lru), self._lru.used, 0

    def close(self) -> None:
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, (self._budget_bytes,)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lru: Lru[int, np.ndarray] = Lru(self._budget_bytes)


class Resident:
    """A whole store, in memory that all processes share.

    Bytes that come from a disk are checked when an item is first touched, once for all processes.
    """

    def __init__(self, file: StoreFile, path: Path | None, notes: "Notes | None" = None) -> None:
        """`path` is the store's on disk; None for one in memory, whose bytes need no check."""
        self._file = file
        self._path = path
        self._notes = notes or (Notes.create(len(file)) if path else None)

    def get(self, index: int) -> np.ndarray | None:
        if not self._file.holds(index) or (self._notes is not None and not self._is_good(index, self._notes)):
            return None
        return self._file.view(index)

    def offer(self, index: int, array: np.ndarray) -> None: ...

    def holds(self, index: int) -> bool:
        return self._file.holds(index) and (self._notes is None or self._notes.note_N[index] != DAMAGED)

    def count(self) -> tuple[int, int, int]:
        here_N = self._file.index["state"] == HERE
        unreadable = int((self._file.index["state"] == UNREADABLE).sum())
        return int(here_N.sum()), int(self._file.index["nbytes"][here_N].sum()), unreadable

    def close(self) -> None:
        self._file.close()
        if self._notes is not None:
            self._notes.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (FdAddress.of(self._file.fd), self._file.header.state, self._path, self._notes)

    def _is_good(self, index: int, notes: "Notes") -> bool:
        if notes.note_N[index] == UNKNOWN:
            notes.note_N[index] = GOOD if self._file.is_intact(index) else DAMAGED
            if notes.note_N[index] == DAMAGED:
                self._discard(index)
        return bool(notes.note_N[index] == GOOD)

    def _discard(self, index: int) -> None:
        """Say that an item is damaged, and have the next run build the store anew."""
        assert self._path is not None
        logger.warning(
            "Item %d in the store %s is damaged and is decoded from its file instead. The store is removed; the next "
            "run builds it anew.",
            index,
            self._path,
        )
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fd)):
                self._path.unlink()
        except OSError:
            return  # removed already, or not ours to remove: then the next run finds the damage again


class Notes:
    """One byte per item, in memory that is shared with every process this is pickled to."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.note_N = np.frombuffer(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED), np.uint8)

    @classmethod
    def create(cls, num_items: int) -> "Notes":
        fd = os.memfd_create("flatout-store-notes")
        os.posix_fallocate(fd, 0, max(1, num_items))
        return cls(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_notes, (FdAddress.of(self._fd),)


def _attach_notes(address: FdAddress) -> Notes:
    return Notes(address.open(os.O_RDWR))


def _attach(address: FdAddress, state: str, path: Path | None, notes: Notes | None) -> Keeper:
    try:
        file = StoreFile(address.open())
        if file.header.state != state:
            raise StoreFileError("it holds other data by now")
        return Resident(file, path, notes)
    except (OSError, StoreFileError) as error:
        logger.warning(
            "The store cannot be opened here (%s): this process decodes everything anew. Keep the store open in the "
            "process that opened it for as long as others use it.",
            error,
        )
        return Nobody()
