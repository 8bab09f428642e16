"""Run a training on real batches that stay in the slots they were made in: what is left when only making them is free.

They go the ordinary way to the device, augmentation there included: copy and compute together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flatout.feed.device import DeviceBatches
from flatout.feed.feed import Pass
from flatout.feed.stream import Lease

KEPT = 2
"""Slots that are held; every feed has more."""


class Replayed:
    """The first batches of a pass, in turn, without an end. Stands for the `Pass` it was made of."""

    def __init__(self, run: Pass) -> None:
        self.works = run.works
        self._leases = _first(run)
        self._number = 0

    def is_ready(self) -> bool:
        return True

    def take(self) -> Lease:
        self._number += 1
        return self._leases[self._number % len(self._leases)]

    def give_back(self, lease: Lease) -> None:
        """It stays."""

    def position_after(self, step: int) -> tuple[int, int]:
        return 0, step + 1


def _first(run: Pass) -> list[Lease]:
    found: list[Lease] = []
    while len(found) < KEPT and (lease := run.take()) is not None:
        found.append(lease)
    return found


@contextmanager
def replayed_batches() -> Iterator[None]:
    """Every training inside the block trains on its first batches again and again."""
    real_epoch = DeviceBatches.epoch

    def epoch(self: DeviceBatches, epoch: int, start: int = 0) -> Any:
        # Of this feed alone: others build stores, and have to end.
        if not isinstance(self.feed.open, _Same):
            self.feed.open = _Same(Replayed(self.feed.open(epoch, start)))  # type: ignore[method-assign, assignment]
        return real_epoch(self, epoch, start)

    DeviceBatches.epoch = epoch  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceBatches.epoch = real_epoch  # type: ignore[method-assign]


class _Same:
    """Stands for `Feed.open`: one pass for every epoch."""

    def __init__(self, run: Replayed) -> None:
        self._run = run

    def __call__(self, epoch: int, start: int = 0) -> Replayed:
        return self._run
