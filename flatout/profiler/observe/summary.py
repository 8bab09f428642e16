"""From what recorders, samplers and probes hold to the lanes and lines of a measurement."""

import math
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from flatout.clock import AHEAD, Event, canonical, machine, want, worker_registry, worker_timelines
from flatout.profiler.measurement import IDLE, WAIT, HotLine, Lane
from flatout.profiler.observe.device_times import DeviceSteps
from flatout.profiler.observe.loader_probe import Tables, line_samples, stage_ns
from flatout.profiler.observe.recorder import Line, Steps, short_place
from flatout.profiler.observe.waits import source_text

Samples = Mapping[tuple[Line, str | None], int]
SHOWN_LINES = 40


def host_lane(steps: Steps, samples: Samples, sampled: Collection[str] = ()) -> Lane:
    """Marked stages, and those that only samples can see (`sampled`: a loss that is a plain function)."""
    num_steps = len(steps.images)
    stage_ms: dict[str, float] = defaultdict(float)
    runs: dict[str, float] = defaultdict(float)
    for name, ns, count in zip(steps.names, steps.self_ns.sum(0), steps.runs.sum(0), strict=True):
        stage_ms[canonical(name)] += float(ns) / 1e6 / num_steps
        runs[canonical(name)] = max(runs[canonical(name)], float(count) / num_steps)
    step_ms, total = float(steps.wall_ns.mean()) / 1e6, max(1, sum(samples.values()))
    seen: Counter[str] = Counter()
    for (_, stage), count in samples.items():
        if stage is not None and stage in sampled and stage not in stage_ms:
            seen[stage] += count
    for stage, count in seen.items():
        # Sampled shares may not take more than the marks leave.
        rest_ms = max(0.0, step_ms - sum(stage_ms.values()))
        stage_ms[stage] = min(step_ms * count / total, rest_ms)
    return Lane(place="host", stage_ms=dict(stage_ms), stage_runs=dict(runs))


def run_ahead(host: Lane, *, host_ms: float, device_ms: float) -> Lane:
    """The main thread's lane when it queues steps faster than the device works them off."""
    if device_ms <= host_ms:
        return host
    ahead_ms = host.stage_ms.get(AHEAD, 0.0) + device_ms - host_ms
    return replace(host, stage_ms=dict(host.stage_ms) | {AHEAD: ahead_ms})


def no_longer_than(step_ms: float, workers: Lane) -> Lane:
    """Nobody works for longer than there is time.

    Work that began before the first timed step is charged when it ends: in a short look, workers that never idle would
    have worked for more than all of it.
    """
    busy_ms = sum(workers.stage_ms.values())
    if busy_ms <= workers.width * step_ms:
        return workers
    share = workers.width * step_ms / busy_ms
    return replace(workers, stage_ms={stage: ms * share for stage, ms in workers.stage_ms.items()})


def with_serial_input(host: Lane, made_here: Lane) -> Lane:
    """The main thread's lane when it makes batches itself: part of its wait for data is work, stage by stage."""
    made_ms = sum(made_here.stage_ms.values())
    stage_ms = dict(host.stage_ms) | {WAIT: max(0.0, host.stage_ms.get(WAIT, 0.0) - made_ms)}
    for stage, ms in made_here.stage_ms.items():
        stage_ms[stage] = stage_ms.get(stage, 0.0) + ms
    return replace(host, stage_ms=stage_ms, stage_runs=dict(host.stage_runs) | dict(made_here.stage_runs))


def device_lane(steps: DeviceSteps, place: str = "device") -> Lane:
    """Marked stages on the compute stream, or on those beside it."""
    means = steps.self_ms.mean(0) if len(steps.self_ms) else np.zeros(len(steps.names))
    stage_ms: dict[str, float] = defaultdict(float)
    for name, ms in zip(steps.names, means, strict=True):
        stage_ms[canonical(name)] += float(ms)
    return Lane(place=place, stage_ms=dict(stage_ms), rest=IDLE)


def hot_lines(samples: Samples, step_ms: float) -> list[HotLine]:
    """Lines of the main thread, hottest first."""
    total = max(1, sum(samples.values()))
    hottest = sorted(samples.items(), key=lambda item: -item[1])[:SHOWN_LINES]
    return [
        HotLine(
            where=short_place(str(line)),
            ms=step_ms * count / total,
            stage=None if stage is None else canonical(stage),
            text=source_text(str(line)),
            function=line.function,
        )
        for (line, stage), count in hottest
    ]


def worker_lines(samples: Counter[tuple[str, str]], busy_ms: float) -> list[HotLine]:
    """Lines of the workers, hottest first; samples are per (file:line, function), `busy_ms` is all their work."""
    total = max(1, sum(samples.values()))
    return [
        HotLine(
            where=short_place(where),
            ms=busy_ms * count / total,
            text=source_text(where),
            function=function,
            in_worker=True,
        )
        for (where, function), count in samples.most_common(SHOWN_LINES)
    ]


def machine_facts() -> dict[str, str]:
    """What the numbers depend on; nothing that names the machine itself."""
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


# What workers did between two moments, whoever they work for: a feed of ours, or a torch DataLoader with a probe.

LOOK_EVERY_S = 2.0


class WorkersSeen(NamedTuple):
    """Per step, all workers together."""

    lane: Lane
    cpu_ms: float
    blocked_ms: float | None
    lines: list[HotLine]
    apart_cpu_ms: float = 0.0
    """CPU time of workers that make no batches for steps, those of a validation."""

    @property
    def num_workers(self) -> int:
        return self.lane.width


class WorkerWatch(Protocol):
    """Looks at workers from `begin` to `end`."""

    num_unseen: int
    """Workers that are known of and cannot be looked into."""

    def begin(self) -> None: ...

    def look(self, num_steps: int) -> None:
        """Between two steps; `num_steps` were timed so far."""

    def end(self, num_steps: int) -> WorkersSeen | None:
        """None: there are none, or they cannot be looked into."""

    def timelines(self) -> dict[str, list[Event]]: ...


class FeedWorkers:
    """Workers of every feed that is started in this process.

    The tables of a feed go with it, so they are looked at now and then: a training that ends before the looking does is
    judged by the last look.
    """

    num_unseen = 0

    def begin(self) -> None:
        self._before = {id(crew): (crew, worker_registry.spent(crew)) for crew in worker_registry.at_work()}
        self._latest: dict[int, tuple[worker_registry.WorkerGroup, worker_registry.Spent, int]] = {}
        self._timelines: dict[int, dict[str, list[Event]]] = {}
        self._looked_s = -math.inf
        for crew, _ in self._before.values():
            want(crew.timelines, True)

    def look(self, num_steps: int) -> None:
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._look(num_steps)

    def end(self, num_steps: int) -> WorkersSeen | None:
        """Crews that did nothing meanwhile do not count, nor do those of a validation."""
        self._look(num_steps)
        for crew in worker_registry.at_work():
            want(crew.timelines, False)
        seen = [
            (crew, _growth(self._spent_before(crew), after, steps, crew.num_workers))
            for crew, after, steps in self._latest.values()
        ]
        busy = [growth for crew, growth in seen if not crew.is_apart and sum(growth.runs.values()) > 0]
        apart_cpu_ms = sum(growth.cpu_ms for crew, growth in seen if crew.is_apart)
        return _together(busy)._replace(apart_cpu_ms=apart_cpu_ms) if busy else None

    def timelines(self) -> dict[str, list[Event]]:
        """Of the crew that did most, as it was at the last look."""
        return max(self._timelines.values(), key=lambda lanes: sum(map(len, lanes.values())), default={})

    def _look(self, num_steps: int) -> None:
        self._looked_s = time.monotonic()
        for crew in worker_registry.at_work():
            if id(crew) in self._before or crew.is_apart:
                self._latest[id(crew)] = crew, worker_registry.spent(crew), num_steps
                if crew.num_workers and not crew.is_apart:
                    self._timelines[id(crew)] = worker_timelines(crew.timelines)

    def _spent_before(self, crew: worker_registry.WorkerGroup) -> worker_registry.Spent:
        before = self._before.get(id(crew))
        return before[1] if before else worker_registry.Spent(Counter(), Counter(), 0, 0)


class _Growth(NamedTuple):
    """What one crew spent per step."""

    stage_ms: Counter[str]
    runs: Counter[str]
    cpu_ms: float
    wanted_ms: float
    num_workers: int


def _growth(before: worker_registry.Spent, after: worker_registry.Spent, num_steps: int, num_workers: int) -> _Growth:
    return _Growth(
        Counter({name: (ns - before.self_ns[name]) / 1e6 / num_steps for name, ns in after.self_ns.items()}),
        Counter({name: (count - before.runs[name]) / num_steps for name, count in after.runs.items()}),
        (after.cpu_ns - before.cpu_ns) / 1e6 / num_steps,
        (after.wanted_ns - before.wanted_ns) / 1e6 / num_steps,
        num_workers,
    )


def _together(crews_busy: list[_Growth]) -> WorkersSeen:
    stage_ms: Counter[str] = sum((each.stage_ms for each in crews_busy), Counter())
    runs: Counter[str] = sum((each.runs for each in crews_busy), Counter())
    wanted_ms = sum(each.wanted_ms for each in crews_busy)
    lane = Lane(
        place="workers",
        stage_ms=dict(stage_ms),
        stage_runs=dict(runs),
        width=sum(each.num_workers for each in crews_busy),
        rest=IDLE,
    )
    blocked_ms = max(0.0, sum(stage_ms.values()) - wanted_ms) if wanted_ms else None
    return WorkersSeen(lane, sum(each.cpu_ms for each in crews_busy), blocked_ms, [])


class ProbedWorkers:
    """Workers of a torch DataLoader that were given a probe."""

    num_unseen = 0

    def __init__(self, tables: Tables, num_workers: int) -> None:
        self._tables = tables
        self._num_workers = num_workers

    def begin(self) -> None:
        self._before = self._tables.snapshot()

    def look(self, num_steps: int) -> None:
        """Its tables stay."""

    def end(self, num_steps: int) -> WorkersSeen | None:
        if not self._num_workers:
            return None
        before, after = self._before, self._tables.snapshot()
        self_ns, runs = stage_ns(before, after)
        lane = Lane(
            place="workers",
            stage_ms={name: ns / 1e6 / num_steps for name, ns in self_ns.items()},
            stage_runs={name: count / num_steps for name, count in runs.items()},
            width=self._num_workers,
            rest=IDLE,
        )
        busy_ms = sum(lane.stage_ms.values())
        cpu_ms, wanted_ms = (
            float((after[name] - before[name]).sum()) / 1e6 / num_steps for name in ("cpu_ns", "wanted_ns")
        )
        blocked_ms = max(0.0, busy_ms - wanted_ms) if after["wanted_ns"].any() else None
        return WorkersSeen(lane, cpu_ms, blocked_ms, worker_lines(line_samples(after), busy_ms))

    def timelines(self) -> dict[str, list[Event]]:
        return worker_timelines(self._tables.snapshot()["timeline"]) if self._num_workers else {}


class NoWorkers:
    """Nothing can be seen of the workers, if there are any."""

    def __init__(self, num_unseen: int = 0) -> None:
        self.num_unseen = num_unseen

    def begin(self) -> None:
        pass

    def look(self, num_steps: int) -> None:
        pass

    def end(self, num_steps: int) -> WorkersSeen | None:
        return None

    def timelines(self) -> dict[str, list[Event]]:
        return {}
