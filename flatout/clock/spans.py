"""Spans: the parts of a run's wall time, from the command to its end.

    with recording() as spans:
        with span("scan"):
            ...
    spans.parts()

Stages (`clock`) tell where the time of a step goes; they are recorded on request, because there are thousands of them.
Spans tell what a run costs besides its steps. There are a few per epoch, so they are always recorded.

Spans may be nested; a part is only the time that no span inside it has, so that parts add up. They are those of one
thread, the one that began to record. Must not import torch.
"""

import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from flatout.clock import machine


class Part(NamedTuple):
    """What all spans of one name took together, without the spans inside them."""

    name: str
    seconds: float
    times: int
    """How often; of "steps" the number of steps."""


class Spans:
    """The spans of one run in this process."""

    def __init__(self, began_s: float | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """`began_s`: when the run began, by `clock`; by default now."""
        self._clock = clock
        self._began_s = clock() if began_s is None else began_s
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._times: Counter[str] = Counter()
        self._counts: dict[str, int] = {}
        self._last_end_s = self._began_s
        """When the last span ended that was in no other."""
        self._inside_s: list[float] = []
        """For each open span, from the outermost: the time of the spans inside it so far."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began_s = self._clock()
        self._inside_s.append(0.0)
        try:
            yield
        finally:
            now_s = self._clock()
            self._add(name, now_s - began_s - self._inside_s.pop())
            if self._inside_s:
                self._inside_s[-1] += now_s - began_s
            else:
                self._last_end_s = now_s

    def count(self, name: str, times: int) -> None:
        """Set how often something happened, where that is not the number of spans."""
        self._counts[name] = times

    @property
    def wall_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began_s

    def parts(self) -> list[Part]:
        """All parts, in the order in which their first spans ended."""
        times = {**self._times, **self._counts}
        return [Part(name, seconds, times[name]) for name, seconds in self._seconds.items()]

    def name_all_so_far(self, name: str) -> None:
        """Give a name to everything since the run began that is in no span."""
        self._add(name, self.wall_s - sum(self._seconds.values()))

    def name_the_last(self, name: str) -> None:
        """Give a name to the time since the last span ended."""
        self._add(name, self._clock() - self._last_end_s)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds
        self._times[name] += 1


class _ThreadState(threading.local):
    """The spans of this thread: those of the current run, and those of a command whose run has not begun yet."""

    current: Spans | None = None
    waiting: Spans | None = None


_thread = _ThreadState()


def span(name: str) -> AbstractContextManager[None]:
    """Record the block as part of the run; does nothing in a thread that no run is recorded in."""
    spans = _thread.current or _thread.waiting
    return nullcontext() if spans is None else spans.span(name)


def begin_command() -> Spans:
    """Begin to record a command: the next run in this thread begins with it, that is, with the start of its process.

    A process that has imported torch did something else before; then the command begins now.
    """
    now_s = time.perf_counter()
    _thread.waiting = Spans(now_s if "torch" in sys.modules else now_s - process_age_s())
    return _thread.waiting


@contextmanager
def recording() -> Iterator[Spans]:
    """Record the run inside the block, from here or, if it is the first one of a command, from the command on."""
    before = _thread.current
    spans, _thread.waiting = _thread.waiting or Spans(), None
    _thread.current = spans
    try:
        yield spans
    finally:
        _thread.current = before


def process_age_s() -> float:
    """Seconds since this process was started; 0 if the system does not tell. Exact to the system's tick, 10 ms."""
    try:
        started_s = machine.start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, AttributeError):
        return 0.0
