"""The step time of a changed training, predicted from the numbers of the present one.

`StepNumbers` are sums over a measurement that several rules use. `StepPrediction` changes one of the demands of a step
and applies the model of flatout/profiler/demands.py, after comparing that model with the measured step: the part of the
present step that the model does not explain remains in every prediction. Trials are turned into remedies at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from flatout.clock import PAUSES, fitting_threads, kind_of
from flatout.profiler.demands import Demands
from flatout.profiler.measurement import HotLine, Lane, Measurement
from flatout.profiler.verdict.remedy import Bottleneck, EndToEndTrial, Remedy, Trial, number

MIN_WAIT_SHARE = 0.03
"""Fraction of the step; an input that makes the step wait for less is no bottleneck."""

HAND_OVER_MS = 1.0
"""Least time of the main thread to receive a batch from a worker: 0.6 to 1.1 ms with our feed, ten times that with
large batches of a DataLoader (bench/results/feed_vs_dataloader_*.md, main CPU)."""


@dataclass(frozen=True)
class StepNumbers:
    """Times and counts derived from a measurement, and step times predicted for a changed training (`with_...`).

    Unless stated otherwise, times are means in ms per step.
    """

    m: Measurement

    @cached_property
    def step_ms(self) -> float:
        return float(np.mean(self.m.wall_ms))

    @property
    def images(self) -> float:
        return self.m.images

    @cached_property
    def host(self) -> Lane:
        """The lane of the main thread; empty if it was not measured."""
        return self.m.lane("host") or Lane(place="host", stage_ms={})

    def host_ms(self, *stages: str) -> float:
        """Time of some stages on the main thread."""
        return sum(self.host.stage_ms.get(stage, 0.0) for stage in stages)

    def host_times(self, stage: str) -> float:
        """Runs of a stage on the main thread, all steps together; 0 if not counted."""
        return self.host.stage_runs.get(stage, 0.0) * len(self.m.wall_ms)

    def kind_ms(self, kind: str) -> float:
        """Time of all stages of one kind on the main thread."""
        return sum(ms for stage, ms in self.host.stage_ms.items() if kind_of(stage) == kind)

    @property
    def between_ms(self) -> float:
        """Time between steps, spread over the steps: a validation of 40 ms after every 8 steps is 5 ms per step."""
        return self.host_ms(*PAUSES)

    @property
    def network_ms(self) -> float:
        """Forward and backward on the main thread, or the CUDA graph that contains them."""
        return self.host_ms("forward", "backward", "graph")

    @property
    def unexplained_ms(self) -> float:
        return self.step_ms - sum(self.host.stage_ms.values())

    @property
    def wait_ms(self) -> float:
        """Time in which the main thread is blocked because no batch is ready."""
        return self.kind_ms("wait")

    @property
    def serial_input_ms(self) -> float:
        """Time in which the main thread makes batches itself; 0 with workers."""
        return self.kind_ms("input") if self.m.num_workers == 0 else 0.0

    @property
    def consumer_ms(self) -> float:
        """Step time if batches were always ready."""
        return max(0.0, self.step_ms - self.wait_ms - self.serial_input_ms)

    @cached_property
    def worker_ms(self) -> dict[str, float]:
        """Time per stage of all workers together."""
        lane = self.m.lane("workers")
        return dict(lane.stage_ms) if lane else {}

    @property
    def input_ms(self) -> float:
        """Time of one core that a batch takes, wherever it is made."""
        return sum(self.worker_ms.values()) if self.m.num_workers else self.serial_input_ms + self.wait_ms

    @property
    def is_input_unobserved(self) -> bool:
        """Whether the making of batches could not be observed: workers without a table, or threads of a loader."""
        if self.m.num_workers:
            return not self.worker_ms
        return not self.serial_input_ms and self.m.main_cpu_ms < self.step_ms - 0.5 * self.wait_ms

    @property
    def worker_busy(self) -> float:
        """Fraction of the workers' time in which they are busy."""
        return self.input_ms / (max(1, self.m.num_workers) * self.step_ms) if self.m.num_workers else 0.0

    @property
    def worker_blocked(self) -> float:
        """Fraction of the time in which batches are made, by workers or by the main thread, that is spent waiting: for
        a disk, a network or a sleep."""
        return min(1.0, (self.m.worker_blocked_ms or 0.0) / self.input_ms) if self.input_ms else 0.0

    @property
    def cpu_ms(self) -> float:
        """CPU time of the main process and the workers."""
        workers_ms = self.m.worker_cpu_ms if self.m.worker_cpu_ms is not None else sum(self.worker_ms.values())
        return self.m.main_cpu_ms + workers_ms

    @property
    def used_cores(self) -> float:
        """Number of cores that this training kept busy."""
        return min(self.m.usable_cores, self.cpu_ms / self.step_ms)

    @property
    def is_crowded(self) -> bool:
        """Whether other processes leave no core idle, so that stages take longer than their work alone."""
        others = self.m.others_cores or 0.0
        return others > 0.2 and self.m.usable_cores - others - self.used_cores < 0.25

    @property
    def free_cores(self) -> float:
        """Cores that other processes leave to this training: those it used and those that were idle."""
        return max(self.used_cores, self.m.usable_cores - (self.m.others_cores or 0.0), 0.1)

    @property
    def threads_that_fit(self) -> int | None:
        """Number of torch's threads that have a free core, if torch computes on the CPU with more; None: all fit."""
        threads = self.m.num_threads
        return fitting_threads(threads, self.free_cores) if threads and not self.m.has_device else None

    @property
    def device_idle_ms(self) -> float:
        """Idle time of the device inside steps (pauses between them are not traced); 0 without a device or a trace."""
        busy = self.m.device_busy_ms
        return max(0.0, self.step_ms - self.between_ms - busy) if busy is not None else 0.0

    @property
    def num_waits(self) -> float:
        """Host-device waits inside a step; without a device, values read out of tensors one at a time."""
        return sum(site.per_step for site in self.m.waits)

    def hot_lines(self, *, in_worker: bool) -> list[HotLine]:
        """Hot lines of the main thread or of the workers, hottest first."""
        return sorted((line for line in self.m.lines if line.in_worker == in_worker), key=lambda line: -line.ms)

    def percent(self, ms: float) -> str:
        """A time as a percentage of the step: '41 %'."""
        return f"{100 * ms / self.step_ms:.0f} %"

    def remedy(
        self,
        *,
        what: str,
        change: str,
        step_ms: float,
        uncertainty: float,
        switch: Mapping[str, Any] | None = None,
        images: float | None = None,
    ) -> Remedy:
        """A remedy for this training. `images`: per step with it, if that may be another number than now."""
        return Remedy(
            what=what,
            change=change,
            step_ms=step_ms,
            uncertainty=uncertainty,
            now_ms=self.step_ms,
            images=images or self.images,
            now_images=self.images if images else None,
            switch=switch or {},
        )

    def bottleneck(
        self,
        *,
        cause: str,
        sentence: str,
        evidence: Sequence[str],
        what: str,
        change: str,
        uncertainty: float,
        cost_ms: float,
        step_ms: float | None = None,
    ) -> Bottleneck:
        """A bottleneck with a single remedy; by default, the main thread then takes `cost_ms` less."""
        step_ms = self.with_faster_consumer(cost_ms) if step_ms is None else step_ms
        only = self.remedy(what=what, change=change, step_ms=step_ms, uncertainty=uncertainty)
        return Bottleneck(cause=cause, sentence=sentence, evidence=evidence, remedies=[only], cost_ms=cost_ms)

    # Step times of a changed training

    @property
    def demands(self) -> Demands:
        """What a step needs now; the model that the predictions below rest on."""
        if self.is_crowded and self.m.num_workers and not self.m.has_device:
            # Workers and main thread compete for cores: each needs its CPU time, divided by the fraction of the
            # machine that this training gets.
            share = min(1.0, max(0.05, self.used_cores))
            worker_ms = (self.cpu_ms - self.m.main_cpu_ms) / share + (self.m.worker_blocked_ms or 0.0)
            consumer_ms = min(self.consumer_ms, self.m.main_cpu_ms / share)
            return Demands(consumer_ms, min(self.input_ms, worker_ms), self.cpu_ms, self.m.num_workers, self.free_cores)
        return Demands(self.consumer_ms, self.input_ms, self.cpu_ms, self.m.num_workers, self.free_cores)

    @property
    def bias(self) -> float:
        """Measured step relative to the modelled one, from 1 (also if work overlaps better than modelled) to 1.5."""
        modelled = self.demands.step_ms
        # Above 1 a step waits although nothing is scarce: waits come in bursts, and less demand does not remove all.
        return min(1.5, max(1.0, self.step_ms / modelled)) if modelled > 0 else 1.0

    def _step(self, then: Demands) -> float:
        return max(then.step_ms * self.bias, self.min_step_ms)

    @property
    def min_step_ms(self) -> float:
        """Lower bound of the step for remedies of the input, with the measured time of the network alone, if any."""
        return max(self.floor_ms, min(self.m.limits.compute_ms or 0.0, self.step_ms))

    @property
    def floor_ms(self) -> float:
        """Lower bound for remedies outside of the network: the device's work, and the time between steps."""
        return (self.m.device_busy_ms or 0.0) + self.between_ms

    @property
    def input_limit_ms(self) -> float:
        """Lower bound for remedies of the main thread: the measured time of the input alone; 0 if not measured."""
        return min(self.m.limits.input_ms or 0.0, self.step_ms)

    def with_workers(self, workers: int) -> float:
        """Step with another number of workers; going from none to some adds the time to hand batches over."""
        now = self.demands
        hand_over_ms = HAND_OVER_MS if not now.workers else 0.0
        return self._step(replace(now, workers=workers, consumer_ms=now.consumer_ms + hand_over_ms))

    def with_faster_input(self, saved_ms: float) -> float:
        """Step if making its batch took `saved_ms` less time of one core."""
        now = self.demands
        kept = 1 - min(1.0, saved_ms / max(self.input_ms, 1e-9))
        worker_cpu_ms = now.cpu_ms - self.m.main_cpu_ms
        # Workers that take every core make the main thread queue for one; what they no longer do frees it.
        queued_ms = self.m.main_queued_ms if now.workers and not self.is_crowded else 0.0
        return self._step(
            replace(
                now,
                consumer_ms=max(0.0, now.consumer_ms - (1 - kept) * queued_ms),
                input_ms=now.input_ms * kept,
                cpu_ms=now.cpu_ms - (1 - kept) * worker_cpu_ms,
            )
        )

    def with_batch_size(
        self, images: float, *, tried_now_ms: float, tried_then_ms: float, device_ms: float = 0.0
    ) -> float:
        """Step with another batch size: tried stages take the tried time, input scales with images, the rest stays."""
        now, factor = self.demands, images / self.images
        consumer_ms = now.consumer_ms - tried_now_ms + tried_then_ms
        # What the main thread does for a batch besides making its samples: a DataLoader's own work, once per batch.
        per_batch_ms = 0.0 if now.workers else min(self.wait_ms, now.input_ms)
        then = replace(
            now,
            consumer_ms=consumer_ms,
            input_ms=per_batch_ms + (now.input_ms - per_batch_ms) * factor,
            cpu_ms=self.m.main_cpu_ms * consumer_ms / max(now.consumer_ms, 1e-9)
            + factor * (now.cpu_ms - self.m.main_cpu_ms),
        )
        return max(then.step_ms * self.bias, device_ms + self.between_ms, self.input_limit_ms * factor)

    def with_faster_consumer(self, saved_ms: float, *, device_ms: float | None = None) -> float:
        """Step if the main thread took `saved_ms` less; waits for data may use up the time saved.

        `device_ms` is the kernel time per step then; None: as now.
        """
        then = self._with_less_of_main(saved_ms)
        floor_ms = self.floor_ms if device_ms is None else device_ms + self.between_ms
        return max(then.step_ms * self.bias, floor_ms, self.input_limit_ms)

    def _with_less_of_main(self, saved_ms: float) -> Demands:
        """Demands if the main thread took `saved_ms` less, and as much less CPU time in proportion."""
        now = self.demands
        kept = max(0.0, 1 - saved_ms / max(self.consumer_ms, 1e-9))
        return replace(now, consumer_ms=now.consumer_ms * kept, cpu_ms=now.cpu_ms - (1 - kept) * self.m.main_cpu_ms)

    def with_kept_workers(self, saved_ms: float) -> float:
        """Step if workers were not started again: the main thread waits `saved_ms` less, and workers open nothing."""
        now, start_ms = self.demands, self.m.worker_start_ms
        then = replace(
            now,
            consumer_ms=max(0.0, now.consumer_ms - saved_ms),
            input_ms=max(0.0, now.input_ms - start_ms),
            cpu_ms=max(self.m.main_cpu_ms, now.cpu_ms - start_ms),
        )
        return max(then.step_ms * self.bias, self.floor_ms, self.input_limit_ms)

    def with_parallel_consumer(self, saved_ms: float) -> float:
        """Step if the main thread took `saved_ms` less by computing on more cores: the same CPU time, or more.

        No more than `saved_ms` is saved, also where workers could not be observed and the input seems to take no time.
        """
        now = self.demands
        then = replace(now, consumer_ms=max(0.0, now.consumer_ms - saved_ms))
        at_least_ms = (self.step_ms - saved_ms, then.cpu_ms / then.cores, self.floor_ms, self.input_limit_ms)
        return max(then.step_ms * self.bias, *at_least_ms)

    def with_less_between_steps(self, saved_ms: float, *, floor_ms: float) -> float:
        """Step with `saved_ms` less between steps; workers use that time to get ahead, so waits may replace it."""
        then = self._with_less_of_main(saved_ms)
        return min(self.step_ms, max(self.step_ms - saved_ms, then.step_ms, self.input_limit_ms, floor_ms))


# Trials


def remedy_of(measurement: Measurement, trial: Trial) -> Remedy:
    """The remedy of a trial, whether it would gain anything or not."""
    n = StepNumbers(measurement)
    trial, now_ms = in_ms(n, trial), stage_ms(n, trial)
    saved_ms, device_ms = now_ms - trial.then_ms, _device_ms(n, trial)
    if trial.images is not None:
        step_ms = n.with_batch_size(
            trial.images, tried_now_ms=now_ms, tried_then_ms=trial.then_ms, device_ms=device_ms or 0.0
        )
    elif trial.in_workers:
        step_ms = n.with_faster_input(saved_ms)
    else:
        step_ms = n.with_faster_consumer(saved_ms, device_ms=device_ms)
    return _remedy(n, trial, step_ms)


def remedy_of_end_to_end(n: StepNumbers, trial: EndToEndTrial) -> Remedy:
    """The remedy of an end-to-end trial."""
    return _remedy(n, trial, trial.step_ms(between_ms=n.between_ms))


def _remedy(n: StepNumbers, trial: Trial | EndToEndTrial, step_ms: float) -> Remedy:
    return n.remedy(
        what=trial.what,
        change=trial.change,
        step_ms=step_ms,
        uncertainty=trial.uncertainty,
        images=trial.images or n.images,
        switch=trial.switch,
    )


def _device_ms(n: StepNumbers, trial: Trial) -> float | None:
    """Kernel time per step with the remedy; None without a device or a trace."""
    busy_ms = n.m.device_busy_ms
    if busy_ms is None:
        return None
    if trial.device_share is not None:
        return busy_ms * trial.device_share
    return max(0.0, busy_ms - stage_ms(n, trial) + trial.then_ms)


def in_ms(n: StepNumbers, trial: Trial) -> Trial:
    """The trial with its time in milliseconds of this training, if it was a fraction of its stage."""
    return replace(trial, then_ms=trial.then_ms * stage_ms(n, trial), is_share=False) if trial.is_share else trial


def is_of_loss(trial: Trial) -> bool:
    """Whether a trial is about the loss alone."""
    return set(trial.stage.split("+")) <= {"loss", "assign"}


def stage_ms(n: StepNumbers, trial: Trial) -> float:
    """Present time of the stages of a trial."""
    stages = trial.stage.split("+")
    return sum(n.worker_ms.get(stage, 0.0) for stage in stages) if trial.in_workers else n.host_ms(*stages)


def bottleneck_of_trial(n: StepNumbers, trial: Trial) -> Bottleneck:
    """A trial as a bottleneck of its own: the tried part may be faster, whatever else is found."""
    now_ms, part = stage_ms(n, trial), _stage_names(trial.stage)
    return Bottleneck(
        cause=trial.what,
        sentence=f"With {trial.what}, {part} would take {trial.then_ms:.1f} instead of {now_ms:.1f} ms.",
        evidence=[f"{part}: {now_ms:.1f} ms per step now, {trial.then_ms:.1f} ms when tried by itself"],
        remedies=[remedy_of(n.m, trial)],
        cost_ms=max(0.0, now_ms - trial.then_ms),
    )


def _stage_names(stages: str) -> str:
    """The stages of a trial for a message; a long list is replaced by a summary."""
    return stages if stages.count("+") < 3 else "the network's part of the step"


def bottleneck_of_end_to_end(n: StepNumbers, trial: EndToEndTrial, remedy: Remedy) -> Bottleneck:
    """An end-to-end trial as a bottleneck of its own, used when no other bottleneck has a worthwhile remedy."""
    return Bottleneck(
        cause=trial.what,
        sentence=(
            f"Nothing stands out, but with {trial.change} the training would make {number(remedy.images_per_s)} img/s "
            f"instead of {number(remedy.now_images_per_s)}."
        ),
        evidence=[f"tried with {trial.change}: network {trial.compute_ms:.1f} ms, input {trial.input_ms:.1f} ms"],
        remedies=[remedy],
        cost_ms=max(0.0, n.step_ms - remedy.step_ms),
    )
