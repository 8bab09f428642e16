"""Lanes and hot lines of a measurement, from what recorders, samplers and workers collected."""

import math
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flatout.clock import AHEAD, Event, canonical, machine, want, worker_registry, worker_timelines
from flatout.profiler.measurement import IDLE, WAIT, HotLine, Lane
from flatout.profiler.observe.device_times import DeviceSteps
from flatout.profiler.observe.line_counts import LineCounter
from flatout.profiler.observe.loader_probe import NOTHING_SPENT, ProbedTotals, WorkerTables, line_samples
from flatout.profiler.observe.recorder import Line, Steps, relative_location
from flatout.profiler.observe.waits import source_text

Samples = Mapping[tuple[Line, str | None], int]
"""(line, stage) -> number of samples."""
MAX_LINES = 40


# Main thread and device


def host_lane(steps: Steps, samples: Samples, sampled: Collection[str] = ()) -> Lane:
    """The main thread's lane: marked stages, and `sampled` ones that only samples show (a loss that is a plain
    function)."""
    num_steps = len(steps.images)
    stage_ms: dict[str, float] = defaultdict(float)
    runs: dict[str, float] = defaultdict(float)
    for name, ns, count in zip(steps.names, steps.self_ns.sum(0), steps.runs.sum(0), strict=True):
        stage_ms[canonical(name)] += float(ns) / 1e6 / num_steps
        runs[canonical(name)] = max(runs[canonical(name)], float(count) / num_steps)
    step_ms, total = float(steps.wall_ns.mean()) / 1e6, max(1, sum(samples.values()))
    unmarked: Counter[str] = Counter()
    for (_, stage), count in samples.items():
        if stage is not None and stage in sampled and stage not in stage_ms:
            unmarked[stage] += count
    for stage, count in unmarked.items():
        # Sampled stages may not take more than the marked ones leave.
        rest_ms = max(0.0, step_ms - sum(stage_ms.values()))
        stage_ms[stage] = min(step_ms * count / total, rest_ms)
    return Lane(place="host", stage_ms=dict(stage_ms), stage_runs=dict(runs))


def with_run_ahead(host: Lane, *, host_ms: float, device_ms: float) -> Lane:
    """The main thread's lane with a stage for the time in which the device still works on queued steps."""
    if device_ms <= host_ms:
        return host
    ahead_ms = host.stage_ms.get(AHEAD, 0.0) + device_ms - host_ms
    return replace(host, stage_ms=dict(host.stage_ms) | {AHEAD: ahead_ms})


def limited_to_step(step_ms: float, workers: Lane) -> Lane:
    """The workers' lane, scaled down so that no worker is busy for longer than a step takes.

    Work that began before the first timed step is charged when it ends: in a short observation, workers that never
    idle would otherwise be busy for longer than the observation.
    """
    busy_ms = sum(workers.stage_ms.values())
    if busy_ms <= workers.width * step_ms:
        return workers
    share = workers.width * step_ms / busy_ms
    return replace(workers, stage_ms={stage: ms * share for stage, ms in workers.stage_ms.items()})


def with_serial_input(host: Lane, made_here: Lane) -> Lane:
    """The main thread's lane when it makes batches itself: its wait for data is split into the stages of that work."""
    made_ms = sum(made_here.stage_ms.values())
    stage_ms = dict(host.stage_ms) | {WAIT: max(0.0, host.stage_ms.get(WAIT, 0.0) - made_ms)}
    for stage, ms in made_here.stage_ms.items():
        stage_ms[stage] = stage_ms.get(stage, 0.0) + ms
    return replace(host, stage_ms=stage_ms, stage_runs=dict(host.stage_runs) | dict(made_here.stage_runs))


def device_lane(steps: DeviceSteps, place: str = "device") -> Lane:
    """The lane of a device: marked stages on its compute stream, or on its other streams."""
    means = steps.self_ms.mean(0) if len(steps.self_ms) else np.zeros(len(steps.names))
    stage_ms: dict[str, float] = defaultdict(float)
    for name, ms in zip(steps.names, means, strict=True):
        stage_ms[canonical(name)] += float(ms)
    return Lane(place=place, stage_ms=dict(stage_ms), rest=IDLE)


def hot_lines(
    samples: Samples, total_ms: float, counted: LineCounter | None = None, *, in_worker: bool = False
) -> list[HotLine]:
    """The hottest lines of the main thread or of the workers, hottest first; `total_ms` is the time of all samples."""
    total = max(1, sum(samples.values()))
    hottest = sorted(samples.items(), key=lambda item: -item[1])[:MAX_LINES]
    return [
        HotLine(
            where=relative_location(str(line)),
            ms=total_ms * count / total,
            stage=None if stage is None else canonical(stage),
            text=source_text(str(line)),
            function=line.function,
            in_worker=in_worker,
            runs=counted.runs(line.file, line.line) if counted else 0.0,
            in_graph=counted is not None and counted.is_in_graph(line.file, line.function),
            writes=counted is not None and counted.writes(line.file, line.function),
            samples=count,
        )
        for (line, stage), count in hottest
    ]


def machine_facts() -> dict[str, str]:
    """Hardware and versions that the numbers depend on; nothing that identifies the machine."""
    import torch

    facts = {
        "CPU": machine.cpu_name(),
        "cores": str(machine.cores()),
        "RAM": f"{machine.memory().total / 2**30:.0f} GiB",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "threads": f"{torch.get_num_threads()} of torch, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '-')}",
    }
    if torch.cuda.is_available():
        facts["GPU"] = torch.cuda.get_device_name()
    return facts


# Workers, of a flatout feed or of a torch DataLoader with a probe

POLL_INTERVAL_S = 2.0


class WorkerStats(NamedTuple):
    """What workers did per step, all workers together."""

    lane: Lane
    """Its width is the number of workers; 0: the main thread makes the batches."""
    cpu_ms: float
    blocked_ms: float | None
    lines: list[HotLine]
    apart_cpu_ms: float = 0.0
    """CPU time of workers that do not make batches for training steps: those of a validation."""
    start_ms: float = 0.0
    """What first samples after a start take beyond others."""


class WorkerObserver:
    """Observes workers from `begin` to `end`; by itself, it observes none."""

    def __init__(self, num_unobserved: int = 0) -> None:
        """`num_unobserved`: number of workers that exist and cannot be observed."""
        self.num_unobserved = num_unobserved

    def begin(self) -> None:
        """To be called before the first timed step."""

    def poll(self, num_steps: int) -> None:
        """To be called between two steps; `num_steps` were timed so far."""

    def end(self, num_steps: int) -> WorkerStats | None:
        """What they did since `begin`; None: there are none, or they cannot be observed."""
        return None

    def timelines(self) -> dict[str, list[Event]]:
        return {}


class FeedWorkers(WorkerObserver):
    """Observes the workers of all feeds that were started in this process.

    The tables of a feed disappear when it is closed, so they are read from time to time: a training that ends before
    the observation does is measured by the last reading.
    """

    def begin(self) -> None:
        self._before = {id(group): (group, worker_registry.spent(group)) for group in worker_registry.worker_groups()}
        self._latest: dict[int, tuple[worker_registry.WorkerGroup, worker_registry.WorkerTotals, int]] = {}
        self._timelines: dict[int, dict[str, list[Event]]] = {}
        self._polled_s = -math.inf
        for group, _ in self._before.values():
            want(group.timelines, True)

    def poll(self, num_steps: int) -> None:
        if time.monotonic() - self._polled_s >= POLL_INTERVAL_S:
            self._poll(num_steps)

    def end(self, num_steps: int) -> WorkerStats | None:
        """What they did since `begin`. Groups that did nothing do not count, nor do those of a validation."""
        self._poll(num_steps)
        for group in worker_registry.worker_groups():
            want(group.timelines, False)
        groups = self._latest.values()
        busy = [(group, spent, steps) for group, spent, steps in groups if not group.in_pause and spent.runs]
        if not busy:
            return None
        num_workers = sum(group.num_workers for group, _, _ in busy)
        apart_cpu_ms = sum(spent.cpu_ns / 1e6 / steps for group, spent, steps in groups if group.in_pause)
        return _stats([(spent, steps) for _, spent, steps in busy], num_workers)._replace(apart_cpu_ms=apart_cpu_ms)

    def timelines(self) -> dict[str, list[Event]]:
        """Timelines of the group with the most events, at the last reading."""
        return max(self._timelines.values(), key=lambda lanes: sum(map(len, lanes.values())), default={})

    def _poll(self, num_steps: int) -> None:
        self._polled_s = time.monotonic()
        for group in worker_registry.worker_groups():
            if id(group) in self._before or group.in_pause:
                _, before = self._before.get(id(group), (group, NOTHING_SPENT.spent))
                self._latest[id(group)] = group, worker_registry.spent(group).since(before), num_steps
                if group.num_workers and not group.in_pause:
                    self._timelines[id(group)] = worker_timelines(group.timelines)


def _stats(groups: Sequence[tuple[worker_registry.WorkerTotals, int]], num_workers: int) -> WorkerStats:
    """What groups of workers spent per step, each in its own number of steps."""
    stage_ms: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for spent, steps in groups:
        stage_ms += Counter({name: ns / 1e6 / steps for name, ns in spent.self_ns.items()})
        runs += Counter({name: count / steps for name, count in spent.runs.items()})
    cpu_ms = sum(spent.cpu_ns / 1e6 / steps for spent, steps in groups)
    wanted_ms = sum(spent.wanted_ns / 1e6 / steps for spent, steps in groups)
    lane = Lane(place="workers", stage_ms=dict(stage_ms), stage_runs=dict(runs), width=num_workers, rest=IDLE)
    blocked_ms = max(0.0, sum(stage_ms.values()) - wanted_ms) if wanted_ms else None
    return WorkerStats(lane, cpu_ms, blocked_ms, [])


class ProbedWorkers(WorkerObserver):
    """Observes the workers of the torch DataLoaders that a loop trains on; `watch.probed` wraps their data sets."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: dict[int, tuple[Any, WorkerTables]] = {}  # by loader, which is kept so that its id stays its own
        self._trains: set[int] = set()
        self._before: dict[int, ProbedTotals] = {}
        self._open: list[int] = []  # workers of each pass that is running
        self._most_open = 0

    def tables_of(self, loader: Any) -> WorkerTables:
        """The tables for the workers of a loader."""
        if id(loader) not in self._tables:
            self._tables[id(loader)] = loader, WorkerTables(loader.num_workers)
        return self._tables[id(loader)][1]

    def pass_begins(self, loader: Any) -> None:
        self.tables_of(loader)  # they stay empty if its workers cannot be observed
        self._trains.add(id(loader))
        self._open.append(loader.num_workers)
        self._most_open = max(self._most_open, sum(self._open))

    def pass_ends(self, loader: Any) -> None:
        self._open.remove(loader.num_workers)

    def begin(self) -> None:
        self._before = {key: tables.totals() for key, (_, tables) in self._tables.items()}

    def end(self, num_steps: int) -> WorkerStats | None:
        training = {key: found for key, found in self._tables.items() if key in self._trains}
        if not training:
            return None
        spent = [tables.totals().since(self._before.get(key, NOTHING_SPENT)) for key, (_, tables) in training.items()]
        # Without workers the stages are in the main thread's own lane, and only its waiting is reported here.
        stats = _stats([(each.spent, num_steps) for each in spent], self._most_open)
        blocked_ns = [each.blocked_ns for each in spent if each.spent.wanted_ns]
        samples = sum((line_samples(tables.rows()) for _, tables in training.values()), Counter())
        busy_ms = sum(stats.lane.stage_ms.values())
        return stats._replace(
            blocked_ms=sum(blocked_ns) / 1e6 / num_steps if blocked_ns else None,
            lines=hot_lines(samples, busy_ms, in_worker=True) if self._most_open else [],
            start_ms=sum(each.start_ns for each in spent) / 1e6 / num_steps,
        )

    def timelines(self) -> dict[str, list[Event]]:
        last = [tables for key, (_, tables) in self._tables.items() if key in self._trains][-1:]
        return worker_timelines(last[0].rows()["timeline"]) if last and self._most_open else {}
