"""Batches of a training as somebody wants them who looks at it: heard of, one again and again, or without their making.

They go in at the seams of a run (`flatout.runs.recipe.Seams`); nothing of the training is replaced.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from flatout.engine import Batches
from flatout.feed import DeviceBatch, Feed, HostPass, Lease, Works
from flatout.profiler import DeviceTrace, drain

AHEAD = 6
"""Batches that may have been made before anybody asked (four slots, two on the device), and would flatter the input."""
LEAST_S = 0.5
"""Seconds of the input below which its speed is not believed: batches come in bursts."""
TRACED = 2
"""Batches whose kernels are looked at."""
KEPT = 2
"""Slots that a replay holds; every feed has more."""


class HeardBatches:
    """Batches as they are; `hear` is told of each how many images it has.

    The last one of an epoch may be short, and its step is like no other.
    """

    def __init__(self, batches: Batches, hear: Callable[[int], None]) -> None:
        self._batches, self._hear = batches, hear

    @property
    def held_back_s(self) -> float:
        return self._batches.held_back_s

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        for batch in self._batches.epoch(epoch, start):
            self._hear(len(batch))
            yield batch


class OneBatch:
    """One batch again and again: what is left of a step when its input costs nothing.

    Before, the real feed is asked for some batches that nobody uses: what the input could deliver by itself. Two limits
    from one short run; with a flag switched on, the same run is a trial of the network's part of the step alone.
    """

    held_back_s = 0.0

    def __init__(self, num_batches: int = 0, *, traced: bool = False) -> None:
        """The real feed is asked for `num_batches` or more; `traced`: the kernels that make them are looked at, too."""
        self._num_batches, self._is_traced = num_batches, traced
        self._batches: Batches | None = None
        self._kept: DeviceBatch | None = None
        self.input_ms: float | None = None
        """A batch of the real feed, until it lies complete on the device; None: not asked for."""
        self.kernel_ms = 0.0
        """What its augmentation takes of the device; 0: there is none, or nobody looked."""

    def of(self, batches: Batches) -> Batches:
        """As the seam for batches takes it."""
        self._batches = batches
        return self

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DeviceBatch]:
        if self._kept is None:
            assert self._batches is not None
            self._real = _endless(self._batches, epoch, start)  # a batch is borrowed until its pass goes on, or ends
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


def _endless(batches: Batches, epoch: int, start: int) -> Iterator[DeviceBatch]:
    while True:
        yield from batches.epoch(epoch, start)
        epoch, start = epoch + 1, 0


class ReplayedPass:
    """The first batches of a pass, in turn, without an end, in the slots they were made in.

    They go the ordinary way to the device, augmentation there included: what is left is copy and compute together.
    """

    def __init__(self, run: HostPass) -> None:
        self.works: Works = run.works
        self._leases: list[Lease] = []
        while len(self._leases) < KEPT and (lease := run.take()) is not None:
            self._leases.append(lease)
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


class Replay:
    """Opens one pass for every epoch, as the seam below the copies takes it."""

    def __init__(self) -> None:
        self._pass: ReplayedPass | None = None

    def __call__(self, feed: Feed, epoch: int, start: int) -> HostPass:
        if self._pass is None:
            self._pass = ReplayedPass(feed.open(epoch, start))
        return self._pass
