"""The workers of this process's open feeds: their stage times, CPU time and timelines.

A timeline is a ring buffer of a worker's last stages with their begin and end, in memory that the main process reads.
It costs a worker about a microsecond per stage, so it is only kept while it is wanted.
"""

import operator
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.clock import clock, machine
from flatout.clock.clock import Event, pause_stage

EVENTS_KEPT = 512
EVENT_DTYPE = np.dtype([("name", "S32"), ("begin_ns", np.int64), ("end_ns", np.int64), ("depth", np.int64)])
TIMELINE_DTYPE = np.dtype([("wanted", np.int64), ("num_events", np.int64), ("events", EVENT_DTYPE, EVENTS_KEPT)])
"""Timeline of one worker; the main process sets `wanted`."""


# Timelines


class TracedTotals(clock.Totals):
    """Totals that also keep the begin and end of the last stages, while that is wanted."""

    def __init__(self, table: np.ndarray, timeline: np.ndarray) -> None:
        """`timeline` is TIMELINE_DTYPE [1], in shared memory, zeroed by its owner."""
        super().__init__(table)
        self._wanted = timeline["wanted"].data
        self._number = timeline["num_events"].data
        self._events = timeline["events"][0]
        self._depth = 0

    def opened(self, name: str) -> None:
        self._depth += 1

    def closed(self, name: str, begin_ns: int, end_ns: int, nested_ns: int) -> None:
        self._depth -= 1
        super().closed(name, begin_ns, end_ns, nested_ns)
        if self._wanted[0]:
            self._events[self._number[0] % EVENTS_KEPT] = (name.encode(), begin_ns, end_ns, self._depth)
            self._number[0] += 1


def want(timelines: np.ndarray, wanted: bool) -> None:
    """Switch on or off the recording of these workers' timelines."""
    timelines["wanted"] = wanted


def worker_timelines(timelines: np.ndarray) -> dict[str, list[Event]]:
    """Worker -> its last stages, in order; perf_counter_ns is the same clock in all processes of a machine."""
    return {f"worker {worker}": _events(row["events"].copy()) for worker, row in enumerate(timelines)}


def _events(kept: np.ndarray) -> list[Event]:
    rows = kept[kept["end_ns"] > 0]
    found = [Event(row["name"].decode(), int(row["begin_ns"]), int(row["end_ns"]), int(row["depth"])) for row in rows]
    return sorted(found, key=lambda event: event.end_ns)


# The registry.
#
# A feed announces its workers when it starts; an observation reads all of them when it begins and when it ends.
# Workers write their stages into shared memory anyway, so reading them costs the workers nothing.


class WorkerGroup(NamedTuple):
    """The workers of one feed."""

    stages: np.ndarray  # STAGE_DTYPE [workers, rows], in shared memory
    timelines: np.ndarray  # TIMELINE_DTYPE [workers], in shared memory
    num_workers: int
    """0: the main thread does their work, under its own recorder."""
    pids: Callable[[], Mapping[int, int]]
    """Worker -> process id; empty for threads."""
    in_pause: bool = False
    """Whether the feed was started in a pause, so that it serves something between steps, such as a validation."""


class WorkerTotals(NamedTuple):
    """Sums over the workers of a group, since they started."""

    self_ns: Counter[str]
    runs: Counter[str]
    cpu_ns: int
    wanted_ns: int
    """Time that the processes ran or queued for a core."""

    def since(self, before: "WorkerTotals") -> "WorkerTotals":
        """What was added after `before`."""
        return WorkerTotals(*map(operator.sub, self, before))


_groups: "weakref.WeakKeyDictionary[object, WorkerGroup]" = weakref.WeakKeyDictionary()


def announce(owner: object, group: WorkerGroup) -> None:
    """Register `group` for as long as `owner` lives."""
    _groups[owner] = group._replace(in_pause=pause_stage(clock.innermost()) is not None)


def worker_groups() -> list[WorkerGroup]:
    """The worker groups of all open feeds."""
    return list(_groups.values())


def spent(group: WorkerGroup) -> WorkerTotals:
    """Stage and CPU times of a group's workers so far."""
    pids = list(group.pids().values())
    return WorkerTotals(*stage_sums(group.stages), sum(map(cpu_ns, pids)), sum(map(wanted_ns, pids)))


def stage_sums(tables: np.ndarray) -> tuple[Counter[str], Counter[str]]:
    """Self time in nanoseconds and runs per stage, summed over the tables of several workers."""
    runs = {name: time.runs for name, time in clock.read_totals(tables).items()}
    return Counter(clock.read_self_ns(tables)), Counter(runs)


def cpu_ns(pid: int) -> int:
    """CPU time of a process; 0 if it is gone."""
    try:
        fields = machine.process_fields(pid)
    except OSError:
        return 0
    return int(1e9 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def wanted_ns(task: int | str) -> int:
    """Time for which the main thread of a process, or the thread "thread-self", ran or queued for a core; 0 if the
    system does not report it."""
    return sum(_ran_and_queued_ns(task))


def queued_ns(thread: int) -> int:
    """Time for which a thread of this process (by its native id) could have run and had no core; 0 if the system does
    not report it."""
    return _ran_and_queued_ns(f"self/task/{thread}")[1]


def _ran_and_queued_ns(task: int | str) -> tuple[int, int]:
    try:
        ran, queued, _ = Path(f"/proc/{task}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0, 0
    return int(ran), int(queued)
