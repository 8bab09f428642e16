"""How long would a step take if one thing were different?

The model is compared with the measured step first: what it cannot explain of today stays in every prediction.

The few numbers that decide: sums over a measurement that several rules ask for.

How long is a step, given what it asks of each resource?

A step needs time of the main thread (the consumer), of the workers side by side, and of all cores together; the
scarcest of them sets its length.

    step = max(consumer, input / workers, cpu / cores)        with workers
    step = consumer + input                                   without
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from flatout.clock import PAUSES, fitting_threads, kind_of
from flatout.profiler.demands import Demands
from flatout.profiler.measurement import HotLine, Measurement
from flatout.profiler.verdict.remedy import Bottleneck, EndToEndTrial, Remedy, Trial

MIN_WAIT_SHARE = 0.03
"""Share of the step; a feed that makes a step wait for less is not the cause of anything."""


@dataclass(frozen=True)
class StepNumbers:
    """All times are milliseconds per step."""

    m: Measurement

    @cached_property
    def step_ms(self) -> float:
        return float(np.mean(self.m.wall_ms))

    @cached_property
    def spread(self) -> float:
        """Half of the range from p10 to p90 of the steps, relative."""
        p10, p90 = np.quantile(self.m.wall_ms, (0.1, 0.9))
        return float(p90 - p10) / 2 / self.step_ms

    @property
    def images(self) -> float:
        return self.m.images

    def host_ms(self, *stages: str) -> float:
        """Time of some stages on the main thread."""
        lane = self.m.lane("host")
        return sum(lane.stage_ms.get(stage, 0.0) for stage in stages) if lane else 0.0

    def host_times(self, stage: str) -> float:
        """How often a stage ran on the main thread, in all steps; 0 where nobody counted."""
        lane = self.m.lane("host")
        return lane.stage_runs.get(stage, 0.0) * len(self.m.wall_ms) if lane else 0.0

    def kind_ms(self, kind: str) -> float:
        """Time of all stages of one kind on the main thread."""
        lane = self.m.lane("host")
        return sum(ms for stage, ms in lane.stage_ms.items() if kind_of(stage) == kind) if lane else 0.0

    @property
    def between_ms(self) -> float:
        """What lies between steps, as its share of one: a validation after 8 steps of 5 ms that takes 40 ms is 5."""
        return self.host_ms(*PAUSES)

    @property
    def network_ms(self) -> float:
        """Forward and backward on the main thread, or the graph that stands for them."""
        return self.host_ms("forward", "backward", "graph")

    @property
    def unexplained_ms(self) -> float:
        lane = self.m.lane("host")
        return self.step_ms - (sum(lane.stage_ms.values()) if lane else 0.0)

    @property
    def wait_ms(self) -> float:
        """The main thread is blocked for want of a batch."""
        return self.kind_ms("wait")

    @property
    def serial_input_ms(self) -> float:
        """Input made by the main thread itself, as with no workers."""
        return self.kind_ms("input") if self.m.num_workers == 0 else 0.0

    @property
    def consumer_ms(self) -> float:
        """What the step takes when batches are always ready."""
        return max(0.0, self.step_ms - self.wait_ms - self.serial_input_ms)

    @cached_property
    def worker_ms(self) -> dict[str, float]:
        """Time per stage of all workers together."""
        lane = self.m.lane("workers")
        return dict(lane.stage_ms) if lane else {}

    @property
    def input_ms(self) -> float:
        """Time of one core that a batch costs, wherever it is made."""
        return sum(self.worker_ms.values()) if self.m.num_workers else self.serial_input_ms + self.wait_ms

    @property
    def is_input_unobserved(self) -> bool:
        """Whether nobody saw who makes the batches: workers without a table, or a loader that works elsewhere."""
        if self.m.num_workers:
            return not self.worker_ms
        return not self.serial_input_ms and self.m.main_cpu_ms < self.step_ms - 0.5 * self.wait_ms

    @property
    def worker_busy(self) -> float:
        """Share of the workers' time in which they work."""
        return self.input_ms / (max(1, self.m.num_workers) * self.step_ms) if self.m.num_workers else 0.0

    @property
    def worker_blocked(self) -> float:
        """Share of the workers' work that is waiting for a disk or a network."""
        return (self.m.worker_blocked_ms or 0.0) / self.input_ms if self.m.num_workers and self.input_ms else 0.0

    @property
    def cpu_ms(self) -> float:
        """CPU time of a step: main process and workers."""
        workers_ms = self.m.worker_cpu_ms if self.m.worker_cpu_ms is not None else sum(self.worker_ms.values())
        return self.m.main_cpu_ms + workers_ms

    @property
    def had_cores(self) -> float:
        """Cores that this training kept busy."""
        return min(self.m.usable_cores, self.cpu_ms / self.step_ms)

    @property
    def is_crowded(self) -> bool:
        """Whether other processes leave no core idle: then stages take longer than their work."""
        others = self.m.others_cores or 0.0
        return others > 0.2 and self.m.usable_cores - others - self.had_cores < 0.25

    @property
    def free_cores(self) -> float:
        """Cores that other processes leave to this training: what it had, and those that were idle."""
        return max(self.had_cores, self.m.usable_cores - (self.m.others_cores or 0.0), 0.1)

    @property
    def threads_that_fit(self) -> int | None:
        """For how many threads of torch cores are free, where it computes on the CPU with more; None: they all fit."""
        threads = self.m.num_threads
        return fitting_threads(threads, self.free_cores) if threads and not self.m.has_device else None

    @property
    def main_cpu_percent(self) -> float:
        return 100 * self.m.main_cpu_ms / self.step_ms

    @property
    def device_idle_ms(self) -> float:
        """Inside of steps: pauses between them were not traced. 0 where there is no device, or no trace of it."""
        busy = self.m.device_busy_ms
        return max(0.0, self.step_ms - self.between_ms - busy) if busy is not None else 0.0

    @property
    def num_waits(self) -> float:
        """Host-device waits inside of a step; without a device, numbers read out of tensors."""
        return sum(site.per_step for site in self.m.waits)

    def hot_lines(self, *, in_worker: bool) -> list[HotLine]:
        """Lines of the main thread or of the workers, hottest first."""
        return sorted((line for line in self.m.lines if line.in_worker == in_worker), key=lambda line: -line.ms)

    def percent(self, ms: float) -> str:
        """'41 %' of the step."""
        return f"{100 * ms / self.step_ms:.0f} %"


HAND_OVER_MS = 1.0
"""What a batch from a worker costs the main thread at least: 0.6 to 1.1 ms with our feed, ten times that with large
batches of a DataLoader (bench/results/feed_vs_dataloader_*.md, main CPU)."""


@dataclass(frozen=True)
class StepPrediction:
    """Predicts the step of a changed training from the numbers of the present one."""

    n: StepNumbers

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
        return max(then.step_ms * self.bias, self.min_step_ms)

    @property
    def min_step_ms(self) -> float:
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
    n: StepNumbers,
    *,
    what: str,
    change: str,
    step_ms: float,
    uncertainty: float,
    switch: Mapping[str, Any] | None = None,
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


# From a part that was tried out by itself to the training with that part in it.


def remedy_of(measurement: Measurement, trial: Trial) -> Remedy:
    """What the training would be with the tried part in it, whether that is worth it or not."""
    n = StepNumbers(measurement)
    return remedy_of_trial(n, in_ms(n, trial))


def remedy_of_trial(n: StepNumbers, trial: Trial) -> Remedy:
    """The same, of a trial in milliseconds."""
    now_ms, prediction = stage_ms(n, trial), StepPrediction(n)
    saved_ms, device_ms = now_ms - trial.then_ms, _device_ms(n, trial)
    if trial.images is not None:
        step_ms = prediction.with_batch(
            trial.images, tried_now_ms=now_ms, tried_then_ms=trial.then_ms, device_ms=device_ms or 0.0
        )
    elif trial.in_workers:
        step_ms = prediction.with_input(saved_ms)
    else:
        step_ms = prediction.with_consumer(saved_ms, device_ms=device_ms)
    return Remedy(
        what=trial.what,
        change=trial.change,
        step_ms=step_ms,
        uncertainty=trial.uncertainty,
        now_ms=n.step_ms,
        images=trial.images or n.images,
        now_images=n.images,
        switch=trial.switch,
    )


def _device_ms(n: StepNumbers, trial: Trial) -> float | None:
    """Time of kernels per step with the remedy; None where there is no device, or no trace of it."""
    busy_ms = n.m.device_busy_ms
    if busy_ms is None:
        return None
    if trial.device_share is not None:
        return busy_ms * trial.device_share
    return max(0.0, busy_ms - stage_ms(n, trial) + trial.then_ms)


def in_ms(n: StepNumbers, trial: Trial) -> Trial:
    """What was tried elsewhere as a share of its stage, in milliseconds of this training."""
    return replace(trial, then_ms=trial.then_ms * stage_ms(n, trial), is_share=False) if trial.is_share else trial


def is_of_loss(trial: Trial) -> bool:
    """Whether the loss alone was tried."""
    return set(trial.stage.split("+")) <= {"loss", "assign"}


def stage_ms(n: StepNumbers, trial: Trial) -> float:
    """What the tried part takes now."""
    stages = trial.stage.split("+")
    return sum(n.worker_ms.get(stage, 0.0) for stage in stages) if trial.in_workers else n.host_ms(*stages)


def bottleneck_of_trial(n: StepNumbers, trial: Trial) -> Bottleneck:
    """A part that was tried out and may be faster, whatever else is found."""
    now_ms, part = stage_ms(n, trial), _words_for(trial.stage)
    return Bottleneck(
        cause=trial.what,
        sentence=f"With {trial.what}, {part} would take {trial.then_ms:.1f} ms, not {now_ms:.1f}: tried out.",
        evidence=[f"{part} now {now_ms:.1f} ms, {trial.then_ms:.1f} ms when tried alone"],
        remedies=[remedy_of_trial(n, trial)],
        cost_ms=max(0.0, now_ms - trial.then_ms),
    )


def _words_for(stages: str) -> str:
    """A list of nine stages helps nobody."""
    return stages if stages.count("+") < 3 else "the network's part of the step"


def remedy_of_end_to_end(n: StepNumbers, whole: EndToEndTrial) -> Remedy:
    """What the training would be with network and input as they were tried."""
    return Remedy(
        what=whole.what,
        change=whole.change,
        step_ms=whole.step_ms(between_ms=n.between_ms),
        uncertainty=whole.uncertainty,
        now_ms=n.step_ms,
        images=whole.images or n.images,
        now_images=n.images,
        switch=whole.switch,
    )


def bottleneck_of_end_to_end(n: StepNumbers, whole: EndToEndTrial, answer: Remedy) -> Bottleneck:
    """Where nothing else is found."""
    return Bottleneck(
        cause=whole.what,
        sentence=f"Nothing stands out, but with {whole.change} a step would take {answer.step_ms:.1f} ms.",
        evidence=[f"tried by themselves: network {whole.compute_ms:.1f} ms, input {whole.input_ms:.1f} ms"],
        remedies=[answer],
        cost_ms=max(0.0, n.step_ms - answer.step_ms),
    )
