"""Which line of code is running? A thread that looks at another one every few dozen milliseconds.

It sees what marks cannot: code that nobody marked. A sample is charged to the innermost frame that is
not part of Python, torch or another installed package, so it names a line its reader can change. C code
that holds Python's lock is seen when it lets go, at the line that called it.
"""

import random
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

_FOREIGN = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_HERE = str(Path(__file__).parents[1])


EVERY_S = 0.04
"""A sample takes 0.1 to 0.17 ms of a core (the wake-up, mostly): every 40 ms that is at most 0.4 per cent."""


SEEN_WITHIN_S = 0.0005
"""How long a thread that runs Python may keep a sample waiting. By default it is 5 ms: until then most code has called
something that lets go of Python's lock, and that line would be seen in the place of those that took the time."""


class Line(NamedTuple):
    """A place in somebody's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Sampler:
    """Samples one thread, by default the one that makes it. `close()` may be called twice."""

    def __init__(
        self,
        *,
        interval_s: float = EVERY_S,
        thread_id: int | None = None,
        label: Callable[[], str | None] = lambda: None,
        functions: Mapping[CodeType, str] | None = None,
        on_sample: Callable[[Line, str | None], None] | None = None,
    ) -> None:
        """`label` says what the thread is at (its stage); if it does not know, `functions` may: code that was called
        -> label. `on_sample` replaces counting.
        """
        self._interval_s = interval_s
        self._thread_id = threading.get_ident() if thread_id is None else thread_id
        self._label = label
        self._functions = functions or {}
        self.counts: Counter[tuple[Line, str | None]] = Counter()
        self._on_sample = on_sample or self._count
        # Held until it is closed. Waiting for a lock wakes up at half of what waiting for an Event costs.
        self._going_on = threading.Lock()
        self._going_on.acquire()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, SEEN_WITHIN_S))
        self._thread = threading.Thread(target=self._run, name="flatout-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive() and self._going_on.locked():
            self._going_on.release()
            sys.setswitchinterval(self._switch_s)
        self._thread.join()

    @property
    def num_samples(self) -> int:
        return sum(self.counts.values())

    def restart(self) -> None:
        """Forget what was seen."""
        self.counts.clear()

    def _run(self) -> None:
        waits_s = uneven(self._interval_s)
        while not self._going_on.acquire(timeout=next(waits_s)):
            frame = sys._current_frames().get(self._thread_id)
            if frame is not None:
                self._on_sample(own_line(frame), self._label() or self._function(frame))

    def _function(self, frame: FrameType | None) -> str | None:
        while self._functions and frame is not None:
            if frame.f_code in self._functions:
                return self._functions[frame.f_code]
            frame = frame.f_back
        return None

    def _count(self, line: Line, label: str | None) -> None:
        self.counts[line, label] += 1


def uneven(interval_s: float) -> Iterator[float]:
    """Waits of `interval_s` on average: even ones would find steps of the same length at the same line each time."""
    numbers = random.Random(0)
    while True:
        yield interval_s * numbers.uniform(0.5, 1.5)


def own_line(frame: FrameType | None) -> Line:
    """The innermost line that belongs to no installed package; if there is none, the innermost of all."""
    first = frame
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            return _line(frame)
        frame = frame.f_back
    assert first is not None
    return _line(first)


def is_foreign(file: str) -> bool:
    """Whether code belongs to Python, an installed package or this profiler: nothing its reader would change."""
    return file.startswith((*_FOREIGN, _HERE, "<frozen"))


def _line(frame: FrameType) -> Line:
    return Line(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def short_place(where: str) -> str:
    """file:line relative to the working folder, if it lies inside it."""
    file, _, line = where.rpartition(":")
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except ValueError:
        return where
