"""Pictures of one shape together, and their results in the order in which they came."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from flatout.yolo.predict.frames import Prepared

T = TypeVar("T")


class Numbered(NamedTuple):
    """A picture and its place in the order."""

    place: int
    prepared: Prepared


class Groups:
    """Collects pictures until enough have the same shape of input, or until the oldest has waited long enough."""

    def __init__(self, at_once: int, *, patience: int = 2) -> None:
        """At most `patience` * `at_once` pictures wait, each in its own size: large photos take room. Which ones share
        a batch depends on their order alone, never on time."""
        self._at_once, self._most_waiting = at_once, patience * at_once
        self._waiting: deque[Numbered] = deque()

    def add(self, place: int, prepared: Prepared) -> list[Numbered]:
        """The batch that is now complete; empty if none is."""
        self._waiting.append(Numbered(place, prepared))
        alike = self._alike(prepared)
        if len(alike) == self._at_once:
            return self._take(alike)
        if len(self._waiting) > self._most_waiting:
            return self._take(self._alike(self._waiting[0].prepared))
        return []

    def rest(self) -> Iterator[list[Numbered]]:
        """Whatever waits, as batches."""
        while self._waiting:
            yield self._take(self._alike(self._waiting[0].prepared))

    def _alike(self, prepared: Prepared) -> list[Numbered]:
        shape = prepared.input_3hw.shape
        return [waiting for waiting in self._waiting if waiting.prepared.input_3hw.shape == shape]

    def _take(self, batch: list[Numbered]) -> list[Numbered]:
        places = {numbered.place for numbered in batch}
        self._waiting = deque(numbered for numbered in self._waiting if numbered.place not in places)
        return batch


class InOrder(Generic[T]):
    """Takes results as they come and gives them in the order of their places, from 0 on."""

    def __init__(self) -> None:
        self._early: dict[int, T] = {}
        self._next = 0

    def put(self, place: int, result: T) -> None:
        self._early[place] = result

    def ready(self) -> Iterator[T]:
        """All that are next in order."""
        while self._next in self._early:
            result = self._early.pop(self._next)
            self._next += 1
            yield result
