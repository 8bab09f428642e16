"""What workers did between two moments, whoever they work for: a feed of ours, or a torch DataLoader with a probe."""

from typing import NamedTuple, Protocol

from flatout.profiler import crews
from flatout.profiler.loader_probe import Tables, line_samples, stage_ns, worker_timelines
from flatout.profiler.measurement import IDLE, HotLine, Lane
from flatout.profiler.recorder import Event
from flatout.profiler.summary import worker_lines


class WorkersSeen(NamedTuple):
    """Per step, all workers together."""

    lane: Lane
    cpu_ms: float
    blocked_ms: float | None
    lines: list[HotLine]

    @property
    def num_workers(self) -> int:
        return self.lane.width


class WorkerWatch(Protocol):
    """Looks at workers from `begin` to `end`."""

    def begin(self) -> None: ...

    def end(self, num_steps: int) -> WorkersSeen | None:
        """None: there are none, or they cannot be looked into."""

    def timelines(self) -> dict[str, list[Event]]: ...


class FeedWorkers:
    """Workers of every feed that is started in this process."""

    def begin(self) -> None:
        self._before = [(crew, crews.spent(crew)) for crew in crews.at_work()]

    def end(self, num_steps: int) -> WorkersSeen | None:
        """Crews that did nothing meanwhile (those of a validation, say) do not count."""
        # The tables of a feed that was closed meanwhile are gone with it.
        alive = {id(crew) for crew in crews.at_work()}
        changes = [(crew, before, crews.spent(crew)) for crew, before in self._before if id(crew) in alive]
        busy = [change for change in changes if sum(change[2].runs.values()) > sum(change[1].runs.values())]
        if not busy:
            return None
        self_ns, runs = busy[0][2].self_ns.copy(), busy[0][2].runs.copy()
        for _, _, after in busy[1:]:
            self_ns, runs = self_ns + after.self_ns, runs + after.runs
        for _, before, _ in busy:
            self_ns.subtract(before.self_ns)
            runs.subtract(before.runs)
        lane = Lane(
            place="workers",
            stage_ms={name: ns / 1e6 / num_steps for name, ns in self_ns.items()},
            stage_runs={name: count / num_steps for name, count in runs.items()},
            width=sum(crew.num_workers for crew, _, _ in busy),
            rest=IDLE,
        )
        cpu_ms = sum(after.cpu_ns - before.cpu_ns for _, before, after in busy) / 1e6 / num_steps
        wanted_ms = sum(after.wanted_ns - before.wanted_ns for _, before, after in busy) / 1e6 / num_steps
        blocked_ms = max(0.0, sum(lane.stage_ms.values()) - wanted_ms) if wanted_ms else None
        return WorkersSeen(lane, cpu_ms, blocked_ms, [])

    def timelines(self) -> dict[str, list[Event]]:
        return {}


class ProbedWorkers:
    """Workers of a torch DataLoader that were given a probe."""

    def __init__(self, tables: Tables, num_workers: int) -> None:
        self._tables = tables
        self._num_workers = num_workers

    def begin(self) -> None:
        self._before = self._tables.snapshot()

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
        return worker_timelines(self._tables.snapshot()) if self._num_workers else {}


class NoWorkers:
    """Nothing can be seen of the workers, if there are any."""

    def begin(self) -> None:
        pass

    def end(self, num_steps: int) -> WorkersSeen | None:
        return None

    def timelines(self) -> dict[str, list[Event]]:
        return {}
