"""What workers did between two moments, whoever they work for: a feed of ours, or a torch DataLoader with a probe."""

import math
import time
from collections import Counter
from typing import NamedTuple, Protocol

from flatout.profiler import crews
from flatout.profiler.loader_probe import Tables, line_samples, stage_ns
from flatout.profiler.measurement import IDLE, HotLine, Lane
from flatout.profiler.recorder import Event
from flatout.profiler.shared_timeline import want, worker_timelines
from flatout.profiler.summary import worker_lines

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
        self._before = {id(crew): (crew, crews.spent(crew)) for crew in crews.at_work()}
        self._latest: dict[int, tuple[crews.Crew, crews.Spent, int]] = {}
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
        for crew in crews.at_work():
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
        for crew in crews.at_work():
            if id(crew) in self._before or crew.is_apart:
                self._latest[id(crew)] = crew, crews.spent(crew), num_steps
                if crew.num_workers and not crew.is_apart:
                    self._timelines[id(crew)] = worker_timelines(crew.timelines)

    def _spent_before(self, crew: crews.Crew) -> crews.Spent:
        return self._before[id(crew)][1] if id(crew) in self._before else crews.Spent(Counter(), Counter(), 0, 0)


class _Growth(NamedTuple):
    """What one crew spent per step."""

    stage_ms: Counter[str]
    runs: Counter[str]
    cpu_ms: float
    wanted_ms: float
    num_workers: int


def _growth(before: crews.Spent, after: crews.Spent, num_steps: int, num_workers: int) -> _Growth:
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
