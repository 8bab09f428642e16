"""Caches of decoded items: a whole store, the items used last, or none.

They share the interface of `ItemCache`. Unpickled in a worker, a `ResidentCache` attaches to the same memory, and a
`RecentCache` starts empty, with memory of its own.

Dimension key:  N items
"""

import logging
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from flatout.feed.store.file import STORED, UNREADABLE, StoreFile, StoreFileError
from flatout.feed.store.home import FdAddress, remove_same

logger = logging.getLogger(__name__)

# Least recently used items, for `StoreConfig(policy="lru")`.
#
# If a shuffled epoch does not fit, most items are evicted before they are used again: with room for half of the items,
# the hit rate is 15 %, while a fixed resident half gives 50 % (bench/store.py).

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Lru(Generic[Key, Value]):
    """Values by key, up to `budget` in total; sizes are in the unit of the budget: bytes, or 1 per item.

    Not thread-safe.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        """Values and their sizes."""

    def get(self, key: Key) -> Value | None:
        """The value, which becomes the newest; None if it is not cached."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        value, _ = self._kept[key]
        return value

    def put(self, key: Key, value: Value, size: int = 1) -> list[Key]:
        """Add a value as the newest; returns the evicted keys, oldest first.

        A value larger than the whole budget is rejected, and nothing is evicted for it.
        """
        if size > self.budget:
            return []
        if key in self._kept:
            self.used -= self._kept.pop(key)[1]
        evicted = []
        while self.used + size > self.budget:
            oldest, (_, freed) = self._kept.popitem(last=False)
            self.used -= freed
            evicted.append(oldest)
        self._kept[key] = value, size
        self.used += size
        return evicted

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[Key]:
        """Keys, oldest first."""
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


# Caches

UNKNOWN, GOOD, DAMAGED = 0, 1, 2


class ItemCache:
    """Read-only arrays by index. This one caches nothing: every item is decoded on every access."""

    def get(self, index: int) -> np.ndarray | None:
        """The array, or None if it is not cached."""
        return None

    def offer(self, index: int, array: np.ndarray) -> None:
        """Offer an array that was not cached and had to be decoded."""

    def holds(self, index: int) -> bool:
        return False

    def count(self) -> tuple[int, int, int]:
        """Number of cached items, their bytes, and number of items known to be unreadable."""
        return 0, 0, 0

    def close(self) -> None:
        """Release the memory; may be called twice."""


class RecentCache(ItemCache):
    """The items used last, cached by each process separately."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._begin()

    def get(self, index: int) -> np.ndarray | None:
        if self._pid != os.getpid():  # forked: the lock may be held by a thread that exists only in the parent
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
        return RecentCache, (self._budget_bytes,)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lru: Lru[int, np.ndarray] = Lru(self._budget_bytes)


class ResidentCache(ItemCache):
    """A whole store, in memory that all processes share.

    Bytes from a disk are checked when an item is first accessed, once for all processes.
    """

    def __init__(self, file: StoreFile, path: Path | None, flags: "CheckFlags | None" = None) -> None:
        """`path` is the store's file on disk; None for a store in memory, whose bytes need no check."""
        self._file = file
        self._path = path
        self._flags = flags or (CheckFlags.create(len(file)) if path else None)

    def get(self, index: int) -> np.ndarray | None:
        if not self._file.holds(index) or (self._flags is not None and not self._is_good(index, self._flags)):
            return None
        return self._file.view(index)

    def holds(self, index: int) -> bool:
        return self._file.holds(index) and (self._flags is None or self._flags.flag_N[index] != DAMAGED)

    def count(self) -> tuple[int, int, int]:
        stored_N = self._file.index["state"] == STORED
        unreadable = int((self._file.index["state"] == UNREADABLE).sum())
        return int(stored_N.sum()), int(self._file.index["nbytes"][stored_N].sum()), unreadable

    def close(self) -> None:
        self._file.close()
        if self._flags is not None:
            self._flags.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (FdAddress.of(self._file.fd), self._file.header.state, self._path, self._flags)

    def _is_good(self, index: int, flags: "CheckFlags") -> bool:
        if flags.flag_N[index] == UNKNOWN:
            flags.flag_N[index] = GOOD if self._file.is_intact(index) else DAMAGED
            if flags.flag_N[index] == DAMAGED:
                self._discard(index)
        return bool(flags.flag_N[index] == GOOD)

    def _discard(self, index: int) -> None:
        """Warn about a damaged item and remove the store, so that the next run rebuilds it."""
        assert self._path is not None
        logger.warning(
            "Item %d in the store %s is damaged and is decoded from its file instead. The store is removed; the next "
            "run rebuilds it.",
            index,
            self._path,
        )
        remove_same(self._path, self._file.fd)  # without permission, the next run finds the damage again


class CheckFlags:
    """Whether each item has been checked, one byte per item, in memory shared with all processes that unpickle this."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.close = weakref.finalize(self, os.close, fd)
        self.flag_N = np.frombuffer(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED), np.uint8)

    @classmethod
    def create(cls, num_items: int) -> "CheckFlags":
        fd = os.memfd_create("flatout-store-notes")
        os.posix_fallocate(fd, 0, max(1, num_items))
        return cls(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_flags, (FdAddress.of(self._fd),)


def _attach_flags(address: FdAddress) -> CheckFlags:
    return CheckFlags(address.open(os.O_RDWR))


def _attach(address: FdAddress, state: str, path: Path | None, flags: CheckFlags | None) -> ItemCache:
    try:
        file = StoreFile(address.open())
        if file.header.state != state:
            raise StoreFileError("it now contains other data")
        return ResidentCache(file, path, flags)
    except (OSError, StoreFileError) as error:
        logger.warning(
            "The store cannot be opened in this process (%s), which therefore decodes everything itself. Keep the "
            "store open in the process that opened it for as long as others use it.",
            error,
        )
        return ItemCache()
