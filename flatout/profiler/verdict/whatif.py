"""How long would a step take if one thing were different?

The model: a step needs time of the main thread (the consumer), of the workers side by side, and of all cores
together; the scarcest of them sets its length.

    step = max(consumer, input / workers, cpu / cores)        with workers
    step = consumer + input                                   without

It is held against the measured step first: what the model cannot explain of today stays in every prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flatout.profiler.verdict.numbers import Numbers
from flatout.profiler.verdict.remedy import Remedy

KEPT_DECODED = 0.06
"""Reading a decoded picture from a store costs about this share of decoding it (bench/results/store_*.md)."""

HAND_OVER_MS = 1.0
"""What a batch from a worker costs the main thread at least: 0.6 to 1.1 ms with our feed, ten times that with large
batches of a DataLoader (bench/results/feed_vs_dataloader_*.md, main CPU)."""


@dataclass(frozen=True)
class Demands:
    """What one step asks of each resource, in milliseconds."""

    consumer_ms: float
    input_ms: float
    """Of one worker, if it made the whole batch."""

    cpu_ms: float
    workers: int
    cores: float

    @property
    def step_ms(self) -> float:
        if self.workers == 0:
            return self.consumer_ms + self.input_ms
        return max(self.consumer_ms, self.input_ms / self.workers, self.cpu_ms / self.cores)


@dataclass(frozen=True)
class WhatIf:
    """Predicts the step of a changed training from the numbers of the present one."""

    n: Numbers

    @property
    def now(self) -> Demands:
        n = self.n
        if n.is_crowded and n.m.num_workers and not n.m.has_device:
            # Workers and main thread take cores from each other: what each needs is its CPU time, at the share of the
            # machine that this training gets.
            share = min(1.0, max(0.05, n.had_cores))
            worker_ms = (n.cpu_ms - n.m.main_cpu_ms) / share + (n.m.worker_blocked_ms or 0.0)
            consumer_ms = min(n.consumer_ms, n.m.main_cpu_ms / share)
            return Demands(consumer_ms, min(n.input_ms, worker_ms), n.cpu_ms, n.m.num_workers, n.free_cores)
        return Demands(n.consumer_ms, n.input_ms, n.cpu_ms, n.m.num_workers, n.free_cores)

    @property
    def bias(self) -> float:
        """Measured step over modelled step; below 1 (work that overlaps better than modelled) it counts as 1."""
        modelled = self.now.step_ms
        # A step that waits although nothing is scarce: waits come in bursts, which no remedy of demand removes whole.
        return min(1.5, max(1.0, self.n.step_ms / modelled)) if modelled > 0 else 1.0

    def _step(self, then: Demands) -> float:
        return max(then.step_ms * self.bias, self.least_ms)

    @property
    def least_ms(self) -> float:
        """What no remedy of the input gets below."""
        return max(self.floor_ms, self.network_limit_ms)

    @property
    def floor_ms(self) -> float:
        """No remedy outside of the network gets below the device's own work and what lies between steps."""
        return (self.n.m.device_busy_ms or 0.0) + self.n.between_ms

    @property
    def network_limit_ms(self) -> float:
        """No remedy of the input gets below what the network took by itself, where that was measured."""
        return min(self.n.m.limits.compute_ms or 0.0, self.n.step_ms)

    @property
    def input_limit_ms(self) -> float:
        """Nor does one of the main thread get below what the input took by itself."""
        return min(self.n.m.limits.input_ms or 0.0, self.n.step_ms)

    def with_workers(self, workers: int) -> float:
        """Another number of workers. The first of them has to hand its batches over, which no one did before."""
        now = self.now
        hand_over_ms = HAND_OVER_MS if not now.workers else 0.0
        return self._step(replace(now, workers=workers, consumer_ms=now.consumer_ms + hand_over_ms))

    def with_input(self, saved_ms: float) -> float:
        """Workers save this much of their time per step."""
        now = self.now
        kept = 1 - min(1.0, saved_ms / max(self.n.input_ms, 1e-9))
        worker_cpu_ms = now.cpu_ms - self.n.m.main_cpu_ms
        return self._step(replace(now, input_ms=now.input_ms * kept, cpu_ms=now.cpu_ms - (1 - kept) * worker_cpu_ms))

    def with_batch(self, images: float, *, tried_now_ms: float, tried_then_ms: float, device_ms: float = 0.0) -> float:
        """Another batch size: the tried stages take what was tried, input grows with the images, the rest stays."""
        now, factor = self.now, images / self.n.images
        consumer_ms = now.consumer_ms - tried_now_ms + tried_then_ms
        then = replace(
            now,
            consumer_ms=consumer_ms,
            input_ms=now.input_ms * factor,
            cpu_ms=self.n.m.main_cpu_ms * consumer_ms / max(now.consumer_ms, 1e-9)
            + factor * (now.cpu_ms - self.n.m.main_cpu_ms),
        )
        return max(then.step_ms * self.bias, device_ms + self.n.between_ms, self.input_limit_ms * factor)

    def with_consumer(self, saved_ms: float, *, device_ms: float | None = None) -> float:
        """The main thread saves this much per step; waits for data may take its place.

        `device_ms` is the time of kernels then, inside of steps; None: as now.
        """
        now = self.now
        kept = max(0.0, 1 - saved_ms / max(self.n.consumer_ms, 1e-9))
        then = replace(now, consumer_ms=now.consumer_ms * kept, cpu_ms=now.cpu_ms - (1 - kept) * self.n.m.main_cpu_ms)
        floor_ms = self.floor_ms if device_ms is None else device_ms + self.n.between_ms
        return max(then.step_ms * self.bias, floor_ms, self.input_limit_ms)

    def with_less_after(self, saved_ms: float, *, floor_ms: float) -> float:
        """This much less after steps; workers use such time to get ahead, so waits may take its place."""
        now = self.now
        kept = max(0.0, 1 - saved_ms / max(self.n.consumer_ms, 1e-9))
        then = replace(now, consumer_ms=now.consumer_ms * kept, cpu_ms=now.cpu_ms - (1 - kept) * self.n.m.main_cpu_ms)
        return min(self.n.step_ms, max(self.n.step_ms - saved_ms, then.step_ms, self.input_limit_ms, floor_ms))


def remedy(
    n: Numbers, *, what: str, change: str, step_ms: float, uncertainty: float, switch: Mapping[str, Any] | None = None
) -> Remedy:
    """A change that leaves the images of a step as they are."""
    return Remedy(
        what=what,
        change=change,
        step_ms=step_ms,
        uncertainty=uncertainty,
        now_ms=n.step_ms,
        images=n.images,
        switch=switch or {},
    )
