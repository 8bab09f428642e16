"""Which items does a cache of limited size keep? The ones used last.

Pure bookkeeping, for those who ask for it (`StoreConfig(policy="lru")`). Under a shuffled epoch that does not fit, an
item is evicted before its turn comes again more often than not: room for half of the items hits 15 %, where a fixed
resident half hits 50 % (bench/store.py).
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

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
