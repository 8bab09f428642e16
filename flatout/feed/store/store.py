"""Decode once: items as arrays, from memory that every worker and rank of this machine shares.

files --decode, once--> store --view--> worker, worker, ...
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.clock import StageTime, clock, machine
from flatout.errors import ConfigError
from flatout.feed.store.build import Opened, find_or_build, memory_budget
from flatout.feed.store.file import Items, StoreConfig, decode_item
from flatout.feed.store.keep import Keeper, Nobody, Recent, Resident

HIT, MISS = "store hit", "store miss"
"""Stages that a worker's clock counts; see `Store.statistics`."""


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """What a store holds and how often it helped."""

    items: int
    """Items that are kept."""
    of_items: int
    """Items there are."""
    unreadable: int
    """Items that could not be decoded when the store was built."""
    nbytes: int
    budget_bytes: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Share of the visits that needed no decoding; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        # An epoch that was read ahead may leave nothing to read in its own interval.
        rate = f"{self.hit_rate:.1%}" if self.hits + self.misses else "unknown (nothing was read)"
        return (
            f"{self.items} items, {self.nbytes / 1e6:.1f} MB used / {self.budget_bytes / 1e6:.1f} MB budget, "
            f"hit rate {rate}"
        )


class Store:
    """Items as read-only arrays, decoded once where there is room and on every visit where there is not.

        with Store.open(Photos(paths), StoreConfig(place="disk")) as store:
            image = store[17]

    Put it into a feed's source: workers that get it pickled or by fork see the same memory. An array is a view, valid
    for as long as somebody holds it. `close()` may be called twice.
    """

    def __init__(self, items: Items, keeper: Keeper, *, budget_bytes: int) -> None:
        """Use `Store.open`."""
        self._items = items
        self._keeper: Keeper | None = keeper
        self._budget_bytes = budget_bytes
        self._hits = self._misses = 0
        self._opened: Opened | None = None

    @classmethod
    def open(cls, items: Items, config: StoreConfig | None = None) -> "Store":
        """Find the store of these items, or build it; blocks until it is there."""
        config = config or StoreConfig()
        if config.place == "off" or len(items) == 0:
            return cls(items, Nobody(), budget_bytes=0)
        if config.policy == "lru":
            budget_bytes = memory_budget(config.budget_bytes, machine.memory().free).limit_bytes
            budget_bytes //= max(1, config.num_workers)
            return cls(items, Recent(budget_bytes), budget_bytes=budget_bytes)
        opened = find_or_build(items, config)
        if opened is None:
            return cls(items, Nobody(), budget_bytes=0)
        store = cls(items, Resident(opened.file, opened.path), budget_bytes=opened.budget_bytes)
        store._opened = opened
        return store

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> np.ndarray:
        """The decoded item, read-only; whatever `decode` raises if it has to be decoded and cannot."""
        if not 0 <= index < len(self._items):
            raise IndexError(f"item {index} of a store with {len(self._items)} items")
        keeper = self._open_keeper
        array = keeper.get(index)
        if array is not None:
            self._hits += 1
            clock.count(HIT)
            return array
        self._misses += 1
        with clock.stage(MISS):
            array = decode_item(self._items, index)
        keeper.offer(index, array)
        return array

    def is_resident(self, index: int) -> bool:
        """Whether `store[index]` needs no decoding."""
        return self._open_keeper.holds(index)

    def where(self, index: int) -> str:
        """The file (or key) of an item, for error texts."""
        return self._items.where(index)

    def statistics(self, stages: Mapping[str, StageTime] | None = None) -> StoreStatistics:
        """What is kept, and how often it helped: in this process, or in a feed's workers if their stages are given.

        store.statistics(feed.meter.read().stages)
        """
        num_items, nbytes, unreadable = self._open_keeper.count()
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
        """Give the memory back; arrays that were handed out stay valid until they are dropped."""
        if self._opened is not None:
            self._opened.home.forget_memory(self._opened.file.fd)
            self._opened = None
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None, "_hits": 0, "_misses": 0}

    @property
    def _open_keeper(self) -> Keeper:
        if self._keeper is None:
            raise ConfigError("The store is closed.")
        return self._keeper
