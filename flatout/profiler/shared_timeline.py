"""What a worker did last, in memory that the main process reads while it works.

A ring of the last stages with their begin and end. Keeping them costs a worker about a microsecond per stage, so it
does so only while somebody looks.
"""

import numpy as np

from flatout.profiler import clock
from flatout.profiler.recorder import Event

EVENTS_KEPT = 512
EVENT_DTYPE = np.dtype([("name", "S32"), ("begin_ns", np.int64), ("end_ns", np.int64), ("depth", np.int64)])
TIMELINE_DTYPE = np.dtype([("wanted", np.int64), ("num_events", np.int64), ("events", EVENT_DTYPE, EVENTS_KEPT)])
"""Of one worker; `wanted` is set by whoever looks."""


class TracedTotals(clock.Totals):
    """Totals that also keep begin and end of the last stages, while that is wanted."""

    def __init__(self, table: np.ndarray, timeline: np.ndarray) -> None:
        """`timeline` is TIMELINE_DTYPE [1]: live, and zeroed by its owner."""
        super().__init__(table)
        self._wanted = timeline["wanted"].data
        self._number = timeline["num_events"].data
        self._events = timeline["events"][0]
        self._depth = 0

    def opened(self, name: str) -> None:
        self._depth += 1

    def closed(self, name: str, begin_ns: int, end_ns: int, inside_ns: int) -> None:
        self._depth -= 1
        super().closed(name, begin_ns, end_ns, inside_ns)
        if self._wanted[0]:
            self._events[self._number[0] % EVENTS_KEPT] = (name.encode(), begin_ns, end_ns, self._depth)
            self._number[0] += 1


def want(timelines: np.ndarray, wanted: bool) -> None:
    """Have the workers of these timelines keep their stages from now on, or no more."""
    timelines["wanted"] = wanted


def worker_timelines(timelines: np.ndarray) -> dict[str, list[Event]]:
    """Worker -> what it did last, in order; perf_counter_ns is one clock for all processes of a machine."""
    return {f"worker {worker}": _events(row["events"].copy()) for worker, row in enumerate(timelines)}


def _events(kept: np.ndarray) -> list[Event]:
    rows = kept[kept["end_ns"] > 0]
    found = [Event(row["name"].decode(), int(row["begin_ns"]), int(row["end_ns"]), int(row["depth"])) for row in rows]
    return sorted(found, key=lambda event: event.end_ns)
