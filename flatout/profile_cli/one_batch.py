"""Run a training on one batch again and again: what is left of a step when its input costs nothing.

Before it begins, the real feed is asked for some batches that nobody uses: what the input could deliver by itself. Two
limits from one short run; with a flag switched on, the same run is a trial of the network's part of the step alone.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flatout.feed.device import DeviceBatch, DeviceBatches
from flatout.profiler.device_trace import DeviceTrace
from flatout.profiler.limits import drain

AHEAD = 6
"""Batches that may have been made before anybody asked (four slots, two on the device), and would flatter the input."""

LEAST_S = 0.5
"""Seconds of the input below which its speed is not believed: batches come in bursts."""

TRACED = 2
"""Batches whose kernels are looked at."""


class OneBatch:
    """What is known of the input once the training has taken its first batch."""

    def __init__(self, num_batches: int, *, traced: bool) -> None:
        self._num_batches, self._is_traced = num_batches, traced
        self._kept: DeviceBatch | None = None
        self.input_ms: float | None = None
        """A batch of the real feed, until it lies complete on the device; None: not asked for."""
        self.kernel_ms = 0.0
        """What its augmentation takes of the device; 0: there is none, or nobody looked."""

    def epoch(self, batches: DeviceBatches, epoch: int, start: int) -> Iterator[DeviceBatch]:
        """As `DeviceBatches.epoch`, of the one batch."""
        if self._kept is None:
            self._real = _endless(batches, epoch, start)  # a batch is borrowed until its pass goes on, or ends
            self._kept = self._measure(self._real) if self._num_batches else next(self._real)
        while True:
            yield self._kept

    def _measure(self, real: Iterator[DeviceBatch]) -> DeviceBatch:
        """Host-device waits, before the training begins."""
        most = max(len(next(real)) for _ in range(AHEAD))
        drain()
        begin_s, taken, images = time.perf_counter(), 0, 0
        while taken < self._num_batches or time.perf_counter() - begin_s < LEAST_S:
            batch = next(real)
            taken, images, most = taken + 1, images + len(batch), max(most, len(batch))
        drain()  # what was only queued is not done
        # The last batch of an epoch may be short.
        self.input_ms = 1e3 * (time.perf_counter() - begin_s) * most / images
        batch = _of(most, real)
        if self._is_traced and any(tensor.is_cuda for tensor in batch.fields.values()):
            batch = self._trace(real, most)
        return batch

    def _trace(self, real: Iterator[DeviceBatch], most: int) -> DeviceBatch:
        """A whole batch, and what its kernels take."""
        trace = DeviceTrace()
        trace.start()
        images = sum(len(next(real)) for _ in range(TRACED))
        work = trace.stop(TRACED)
        self.kernel_ms = max(0.0, work.busy_ms - work.copy_ms) * TRACED * most / images
        return _of(most, real)


def _of(images: int, batches: Iterator[DeviceBatch]) -> DeviceBatch:
    """The next batch of so many."""
    return next(batch for batch in batches if len(batch) == images)


_real_epoch = DeviceBatches.epoch


def _endless(batches: DeviceBatches, epoch: int, start: int) -> Iterator[DeviceBatch]:
    while True:
        yield from _real_epoch(batches, epoch, start)
        epoch, start = epoch + 1, 0


@contextmanager
def one_batch(num_batches: int = 0, *, traced: bool = False) -> Iterator[OneBatch]:
    """Every training inside the block trains on one batch.

    Before, the real feed is asked for `num_batches` or more; `traced`: the kernels that make them are looked at, too.
    """
    source = OneBatch(num_batches, traced=traced)

    def epoch(self: DeviceBatches, epoch: int, start: int = 0) -> Any:
        return source.epoch(self, epoch, start)

    DeviceBatches.epoch = epoch  # type: ignore[method-assign]
    try:
        yield source
    finally:
        DeviceBatches.epoch = _real_epoch  # type: ignore[method-assign]
