"""The few numbers that decide: sums over a measurement that several rules ask for."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flatout.clock import PAUSES, fitting_threads, kind_of
from flatout.profiler.measurement import HotLine, Measurement

WAIT_WORTH_A_LOOK = 0.03
"""Share of the step; a feed that makes a step wait for less is not the cause of anything."""


@dataclass(frozen=True)
class Numbers:
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
    def are_makers_unseen(self) -> bool:
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
