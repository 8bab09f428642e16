"""Which workers are at work for this process, and what do they spend?

A feed announces its workers when it starts; an observation asks for all of them when it begins and when it ends.
Workers write their stages into shared memory anyway, so asking costs them nothing.
"""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.profiler import clock
from flatout.profiler.pauses import stage_apart


class Crew(NamedTuple):
    """Workers of one feed."""

    stages: np.ndarray  # STAGE_DTYPE [workers, rows], live
    timelines: np.ndarray  # TIMELINE_DTYPE [workers], live
    num_workers: int
    """0: the main thread does their work, under its own recorder."""
    pids: Callable[[], Mapping[int, int]]
    """Worker -> process id; empty for threads."""
    is_apart: bool = False
    """They work for something between steps, as a validation does: its feed was started in a pause."""


class Spent(NamedTuple):
    """Sums over the workers of all crews, since they started."""

    self_ns: Counter[str]
    runs: Counter[str]
    cpu_ns: int
    wanted_ns: int
    """Ran, or queued for a core."""


_crews: "weakref.WeakKeyDictionary[object, Crew]" = weakref.WeakKeyDictionary()


def announce(owner: object, crew: Crew) -> None:
    """`crew` is at work for as long as `owner` lives."""
    _crews[owner] = crew._replace(is_apart=stage_apart(clock.innermost()) is not None)


def at_work() -> list[Crew]:
    """Crews whose feeds are open."""
    return list(_crews.values())


def spent(crew: Crew) -> Spent:
    """What a crew's workers have spent so far."""
    self_ns: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for table in crew.stages:
        self_ns.update(clock.read_self_ns(table))
        runs.update({name: time.runs for name, time in clock.read_totals(table).items()})
    pids = list(crew.pids().values())
    return Spent(self_ns, runs, sum(map(cpu_ns, pids)), sum(map(wanted_ns, pids)))


def cpu_ns(pid: int) -> int:
    """CPU time of a process, 0 if it is gone."""
    try:
        # The name in parentheses may hold anything; the fields behind it are fixed.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(1e9 * (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK"))


def wanted_ns(pid: int) -> int:
    """Time the main thread of a process has run or queued for a core, 0 where the system does not tell."""
    try:
        ran, queued, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0
    return int(ran) + int(queued)
