"""The store: items decoded once into arrays, in memory that all workers and ranks of this machine share.

files --decode, once--> store --view--> worker, worker, ...
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.clock import StageTime, clock, machine
from flatout.errors import ConfigError
from flatout.feed.store.build import OpenedStore, StoreOpener, memory_budget
from flatout.feed.store.file import Items, StoreConfig, decode_item
from flatout.feed.store.keep import ItemCache, RecentCache, ResidentCache

HIT, MISS = "store hit", "store miss"
"""Clock stages that count hits and misses; see `Store.statistics`."""


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """Contents and hit rate of a store."""

    items: int
    """Number of items in the store."""
    of_items: int
    """Number of all items."""
    unreadable: int
    """Items that could not be decoded when the store was built."""
    nbytes: int
    budget_bytes: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Share of the accesses that needed no decoding; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        # If an epoch was read ahead, nothing may be read in its own interval.
        rate = f"{self.hit_rate:.1%}" if self.hits + self.misses else "unknown (nothing was read)"
        return (
            f"{self.items} items, {self.nbytes / 1e6:.1f} MB used / {self.budget_bytes / 1e6:.1f} MB budget, "
            f"hit rate {rate}"
        )


class Store(AbstractContextManager["Store"]):
    """Items as read-only arrays: decoded once if there is room for them, otherwise on every access.

        with Store.open(Photos(paths), StoreConfig(place="disk")) as store:
            image = store[17]

    Put it into a feed's source: workers that get it pickled or by fork use the same memory. An array is a view, valid
    for as long as it is referenced. `close()` may be called twice.
    """

    def __init__(self, items: Items, cache: ItemCache, *, budget_bytes: int, opened: OpenedStore | None = None) -> None:
        """Use `Store.open`."""
        self._items = items
        self._cache: ItemCache | None = cache
        self._budget_bytes = budget_bytes
        self._hits = self._misses = 0
        self._opened = opened

    @classmethod
    def open(cls, items: Items, config: StoreConfig | None = None) -> "Store":
        """Find the store of these items, or build it; blocks until it is ready."""
        config = config or StoreConfig()
        if config.place == "off" or len(items) == 0:
            return cls(items, ItemCache(), budget_bytes=0)
        if config.policy == "lru":
            budget_bytes = memory_budget(config.budget_bytes, machine.memory().free).limit_bytes
            budget_bytes //= max(1, config.num_workers)
            return cls(items, RecentCache(budget_bytes), budget_bytes=budget_bytes)
        opener = StoreOpener(items, config)
        opened = opener.find() or opener.build()  # None, with a warning, if there is no room
        if opened is None:
            return cls(items, ItemCache(), budget_bytes=0)
        return cls(items, ResidentCache(opened.file, opened.path), budget_bytes=opened.budget_bytes, opened=opened)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> np.ndarray:
        """The decoded item, read-only; if it has to be decoded, `decode` may raise."""
        if not 0 <= index < len(self._items):
            raise IndexError(f"item {index} is out of range: the store has {len(self._items)} items")
        cache = self._open_cache
        array = cache.get(index)
        if array is not None:
            self._hits += 1
            clock.count(HIT)
            return array
        self._misses += 1
        with clock.stage(MISS):
            array = decode_item(self._items, index)
        cache.offer(index, array)
        return array

    def is_resident(self, index: int) -> bool:
        """Whether `store[index]` needs no decoding."""
        return self._open_cache.holds(index)

    def where(self, index: int) -> str:
        """The file (or key) of an item, for error messages."""
        return self._items.where(index)

    def statistics(self, stages: Mapping[str, StageTime] | None = None) -> StoreStatistics:
        """Contents and hit rate: of this process, or of a feed's workers if their stages are given.

        store.statistics(feed.meter.read().stages)
        """
        num_items, nbytes, unreadable = self._open_cache.count()
        hits, misses = self._hits, self._misses
        if stages is not None:
            hits, misses = (stages[name].runs if name in stages else 0 for name in (HIT, MISS))
        return StoreStatistics(
            items=num_items,
            of_items=len(self._items),
            unreadable=unreadable,
            nbytes=nbytes,
            budget_bytes=self._budget_bytes,
            hits=hits,
            misses=misses,
        )

    def close(self) -> None:
        """Release the memory; arrays that were handed out stay valid until they are dropped."""
        if self._opened is not None:
            self._opened.location.forget_memory(self._opened.file.fd)
            self._opened = None
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None, "_hits": 0, "_misses": 0}

    @property
    def _open_cache(self) -> ItemCache:
        if self._cache is None:
            raise ConfigError("The store is closed. Open it again with Store.open().")
        return self._cache
