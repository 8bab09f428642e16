"""Run a training on one batch again and again: what is left of a step when its input costs nothing.

Before it begins, the real feed is asked for some batches that nobody uses: what the input could deliver by itself. Two
limits from one short run; with a flag switched on, the same run is a trial of the network's part of the step alone.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flatout.feed.device import DeviceBatch, DeviceBatches

AHEAD = 3
"""Batches that were made before anybody asked, and would flatter the input."""


class OneBatch:
    """`input_ms` is known once the training has taken its first batch."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._kept: DeviceBatch | None = None
        self.input_ms: float | None = None

    def epoch(self, batches: DeviceBatches, epoch: int, start: int) -> Iterator[DeviceBatch]:
        """As `DeviceBatches.epoch`, of the one batch."""
        if self._kept is None:
            self._kept = self._measure(_endless(batches, epoch, start))
        while True:
            yield self._kept

    def _measure(self, real: Iterator[DeviceBatch]) -> DeviceBatch:
        for _ in range(AHEAD):
            next(real)
        begin_s = time.perf_counter()
        for _ in range(self._num_batches):
            batch = next(real)
        self.input_ms = 1e3 * (time.perf_counter() - begin_s) / self._num_batches
        self._real = real  # a batch is borrowed until its pass goes on, or ends
        return batch


_real_epoch = DeviceBatches.epoch


def _endless(batches: DeviceBatches, epoch: int, start: int) -> Iterator[DeviceBatch]:
    while True:
        yield from _real_epoch(batches, epoch, start)
        epoch, start = epoch + 1, 0


@contextmanager
def one_batch(num_batches: int) -> Iterator[OneBatch]:
    """Every training inside the block trains on one batch."""
    source = OneBatch(num_batches)

    def epoch(self: DeviceBatches, epoch: int, start: int = 0) -> Any:
        return source.epoch(self, epoch, start)

    DeviceBatches.epoch = epoch  # type: ignore[method-assign]
    try:
        yield source
    finally:
        DeviceBatches.epoch = _real_epoch  # type: ignore[method-assign]
