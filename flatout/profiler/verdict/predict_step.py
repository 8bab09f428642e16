"""How long would a step take if one thing were different?

The model (`flatout.profiler.demands`) is held against the measured step first: what it cannot explain of today stays
in every prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flatout.profiler.demands import Demands
from flatout.profiler.measurement import Measurement
from flatout.profiler.verdict.numbers import Numbers
from flatout.profiler.verdict.remedy import Finding, Remedy, Trial, WholeTrial

HAND_OVER_MS = 1.0
"""What a batch from a worker costs the main thread at least: 0.6 to 1.1 ms with our feed, ten times that with large
batches of a DataLoader (bench/results/feed_vs_dataloader_*.md, main CPU)."""


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


# From a part that was tried out by itself to the training with that part in it.


def remedy_of(measurement: Measurement, trial: Trial) -> Remedy:
    """What the training would be with the tried part in it, whether that is worth it or not."""
    n = Numbers(measurement)
    return remedy_of_trial(n, in_ms(n, trial))


def remedy_of_trial(n: Numbers, trial: Trial) -> Remedy:
    """The same, of a trial in milliseconds."""
    now_ms, what_if = stage_ms(n, trial), WhatIf(n)
    saved_ms, device_ms = now_ms - trial.then_ms, _device_ms(n, trial)
    if trial.images is not None:
        step_ms = what_if.with_batch(
            trial.images, tried_now_ms=now_ms, tried_then_ms=trial.then_ms, device_ms=device_ms or 0.0
        )
    elif trial.in_workers:
        step_ms = what_if.with_input(saved_ms)
    else:
        step_ms = what_if.with_consumer(saved_ms, device_ms=device_ms)
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


def _device_ms(n: Numbers, trial: Trial) -> float | None:
    """Time of kernels per step with the remedy; None where there is no device, or no trace of it."""
    busy_ms = n.m.device_busy_ms
    if busy_ms is None:
        return None
    if trial.device_share is not None:
        return busy_ms * trial.device_share
    return max(0.0, busy_ms - stage_ms(n, trial) + trial.then_ms)


def in_ms(n: Numbers, trial: Trial) -> Trial:
    """What was tried elsewhere as a share of its stage, in milliseconds of this training."""
    return replace(trial, then_ms=trial.then_ms * stage_ms(n, trial), is_share=False) if trial.is_share else trial


def is_of_loss(trial: Trial) -> bool:
    """Whether the loss alone was tried."""
    return set(trial.stage.split("+")) <= {"loss", "assign"}


def stage_ms(n: Numbers, trial: Trial) -> float:
    """What the tried part takes now."""
    stages = trial.stage.split("+")
    return sum(n.worker_ms.get(stage, 0.0) for stage in stages) if trial.in_workers else n.host_ms(*stages)


def finding_of_trial(n: Numbers, trial: Trial) -> Finding:
    """A part that was tried out and may be faster, whatever else is found."""
    now_ms, part = stage_ms(n, trial), _words_for(trial.stage)
    return Finding(
        cause=trial.what,
        sentence=f"With {trial.what}, {part} would take {trial.then_ms:.1f} ms, not {now_ms:.1f}: tried out.",
        evidence=[f"{part} now {now_ms:.1f} ms, {trial.then_ms:.1f} ms when tried alone"],
        remedies=[remedy_of_trial(n, trial)],
        cost_ms=max(0.0, now_ms - trial.then_ms),
    )


def _words_for(stages: str) -> str:
    """A list of nine stages helps nobody."""
    return stages if stages.count("+") < 3 else "the network's part of the step"


def remedy_of_whole(n: Numbers, whole: WholeTrial) -> Remedy:
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


def finding_of_whole(n: Numbers, whole: WholeTrial, answer: Remedy) -> Finding:
    """Where nothing else is found."""
    return Finding(
        cause=whole.what,
        sentence=f"Nothing stands out, but with {whole.change} a step would take {answer.step_ms:.1f} ms.",
        evidence=[f"tried by themselves: network {whole.compute_ms:.1f} ms, input {whole.input_ms:.1f} ms"],
        remedies=[answer],
        cost_ms=max(0.0, n.step_ms - answer.step_ms),
    )
