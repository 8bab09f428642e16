"""What each training step spent where: a clock recorder that tells steps apart and keeps a timeline.

    recorder = StepRecorder()
    with recorder.recording():
        for batch in batches:
            ...                                # marks: clock.stage("forward"), ...
            clock.step_ended(len(batch))

Begin and end of every stage are kept for the last steps only, so that a recorder may stay installed for
a whole run. Pauses of Python's garbage collector appear as the stage "gc", taken off the stage they
interrupt.

A mark only notes its times; everything else waits until somebody asks. After a millisecond of matrix
products nothing of Python is left in a core's caches, and a line that runs there costs several times
what it costs in a loop (bench/profiler_overhead.py).

Which line of code is running? A thread that looks at another one every few dozen milliseconds.

It sees what marks cannot: code that nobody marked. A sample is charged to the innermost frame that is
not part of Python, torch or another installed package, so it names a line its reader can change. C code
that holds Python's lock is seen when it lets go, at the line that called it.
"""

import gc
import random
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np

from flatout.clock import PAUSING, Event, clock, owners

GC = "gc"
CHARGED_AT_ONCE = 4096
"""Marks that may wait to be charged to the table."""

Note = tuple[str, int, int, int, int]
"""A mark that has ended: name, begin, end, time of the stages inside, depth."""


class Steps(NamedTuple):
    """What S steps spent in K stages on one thread."""

    begin_ns: np.ndarray  # [S] int64
    end_ns: np.ndarray  # [S] int64
    images: np.ndarray  # [S] int64
    cpu_ns: np.ndarray  # [S] int64: CPU time of the whole process, all threads
    names: tuple[str, ...]  # [K]
    runs: np.ndarray  # [S, K] int64
    self_ns: np.ndarray  # [S, K] int64, without the stages inside; of a pause with all of them but other pauses

    @property
    def wall_ns(self) -> np.ndarray:
        """[S]."""
        return np.asarray(self.end_ns - self.begin_ns)


class DeviceMarks(Protocol):
    """Marks on a device's own timeline; see device_times.py."""

    def opened(self, name: str) -> None: ...
    def closed(self, name: str) -> None: ...
    def step_ended(self) -> None: ...


class StepRecorder(clock.Totals):
    """Takes one thread's marks, and where each step ends."""

    on_pause: Callable[[], None] = staticmethod(lambda: None)
    """Called when a pause begins that lies in no other."""

    def __init__(
        self,
        *,
        device: DeviceMarks | None = None,
        max_steps: int = 2000,
        timeline_events: int = 4096,
        capacity: int = 64,
    ) -> None:
        """Of more than `max_steps` steps the last are kept."""
        super().__init__(capacity=capacity)
        self.device = device
        self._timeline_events = timeline_events
        self._depth = 0
        self._open_pauses = 0
        self._noted: list[Note] = []  # of the step that runs
        self._uncharged: list[Note] = []
        self._collecting: Any = None
        self._notes: deque[list[Note]] = deque(maxlen=max_steps)  # of each step
        # A boundary is the end of one step and the begin of the next: one more of them than of steps.
        self._cpu_ns: deque[int] = deque(maxlen=max_steps + 1)
        self._ends_ns: deque[int] = deque(maxlen=max_steps + 1)
        self._images: deque[int] = deque(maxlen=max_steps)
        self.restart()

    def restart(self) -> None:
        """Forget all steps; the next one begins now."""
        self.charge()
        for kept in (self._notes, self._images, self._cpu_ns, self._ends_ns):
            kept.clear()
        self._cpu_ns.append(time.process_time_ns())
        self._ends_ns.append(time.perf_counter_ns())

    @contextmanager
    def recording(self) -> Iterator["StepRecorder"]:
        """Install for this thread inside the block; the first step begins here."""
        gc.callbacks.append(self._on_collection)
        try:
            with clock.recording(self):
                self.restart()
                yield self
        finally:
            gc.callbacks.remove(self._on_collection)
            self.charge()

    def opened(self, name: str) -> None:
        self._depth += 1
        if name in PAUSING:
            self._open_pauses += 1
            if self._open_pauses == 1:
                self.on_pause()
        if self.device is not None and name != GC:  # a pause of the host is nothing on the device
            self.device.opened(name)

    def closed(self, name: str, begin_ns: int, end_ns: int, inside_ns: int) -> None:
        self._depth -= 1
        self._noted.append((name, begin_ns, end_ns, inside_ns, self._depth))
        if name in PAUSING:
            self._open_pauses -= 1
        if self.device is not None and name != GC:
            self.device.closed(name)

    def step_ended(self, num_images: int) -> None:
        """`num_images` 0: the time since the last step's end belongs to no step (it lies between epochs, say)."""
        # First: a collection that comes at one of the calls below is the next step's.
        notes, self._noted = self._noted, []
        self._ends_ns.append(time.perf_counter_ns())
        self._cpu_ns.append(time.process_time_ns())
        self._images.append(num_images)
        self._notes.append(notes)
        self._uncharged += notes
        if len(self._uncharged) > CHARGED_AT_ONCE:
            self.charge()
        if self.device is not None:
            self.device.step_ended()

    def charge(self) -> None:
        """Bring the table up to date."""
        notes = self._uncharged + self._noted
        self._uncharged, self._noted = [], []
        for name, begin_ns, end_ns, inside_ns, _ in notes:
            self.add(name, end_ns - begin_ns, inside_ns)

    @property
    def timeline(self) -> list[Event]:
        """The last stages of steps that have ended, in the order of their ends."""
        notes = list(chain(*self._notes))[-self._timeline_events :]
        return [Event(name, begin_ns, end_ns, depth) for name, begin_ns, end_ns, _, depth in notes]

    @property
    def num_steps(self) -> int:
        return sum(images > 0 for images in self._images)

    def is_step(self) -> np.ndarray:
        """Of each interval that is kept, bool [S + those between steps]: whether it is a step."""
        return np.array(self._images) > 0

    def steps(self) -> Steps:
        """All steps that have ended."""
        names = tuple(dict.fromkeys(note[0] for note in chain(*self._notes)))
        column = {name: number for number, name in enumerate(names)}
        runs, self_ns = (np.zeros((len(self._notes), len(names)), np.int64) for _ in range(2))
        for step, notes in enumerate(self._notes):
            charged = owners([(note[0], note[4]) for note in notes])
            for (name, begin_ns, end_ns, inside_ns, _), owner in zip(notes, charged, strict=True):
                runs[step, column[name]] += owner == name
                self_ns[step, column[owner]] += end_ns - begin_ns - inside_ns
        ends_ns, images = np.array(self._ends_ns, np.int64), np.array(self._images, np.int64)
        real = self.is_step()
        return Steps(
            begin_ns=ends_ns[:-1][real],
            end_ns=ends_ns[1:][real],
            images=images[real],
            cpu_ns=np.diff(np.array(self._cpu_ns, np.int64))[real],
            names=names,
            runs=runs[real],
            self_ns=self_ns[real],
        )

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        # Collections of other threads stop this one too, but they are charged to nobody's stage.
        if clock._thread.recorder is not self:
            return
        if phase == "start":
            self._collecting = clock.stage(GC)
            self._collecting.__enter__()
        elif self._collecting is not None:
            self._collecting.__exit__(None, None, None)
            self._collecting = None


_INSTALLED_CODE = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PROFILER_CODE = str(Path(__file__).parents[1])


SAMPLE_INTERVAL_S = 0.04
"""A sample takes 0.1 to 0.17 ms of a core (the wake-up, mostly): every 40 ms that is at most 0.4 per cent."""


SWITCH_INTERVAL_S = 0.0005
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
        interval_s: float = SAMPLE_INTERVAL_S,
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
        self._open_lock = threading.Lock()
        self._open_lock.acquire()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._run, name="flatout-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive() and self._open_lock.locked():
            self._open_lock.release()
            sys.setswitchinterval(self._switch_s)
        self._thread.join()

    @property
    def num_samples(self) -> int:
        return sum(self.counts.values())

    def restart(self) -> None:
        """Forget what was seen."""
        self.counts.clear()

    def _run(self) -> None:
        waits_s = jittered(self._interval_s)
        while not self._open_lock.acquire(timeout=next(waits_s)):
            frame = sys._current_frames().get(self._thread_id)
            if frame is not None:
                self._on_sample(user_line(frame), self._label() or self._function(frame))

    def _function(self, frame: FrameType | None) -> str | None:
        while self._functions and frame is not None:
            if frame.f_code in self._functions:
                return self._functions[frame.f_code]
            frame = frame.f_back
        return None

    def _count(self, line: Line, label: str | None) -> None:
        self.counts[line, label] += 1


def jittered(interval_s: float) -> Iterator[float]:
    """Waits of `interval_s` on average: even ones would find steps of the same length at the same line each time."""
    numbers = random.Random(0)
    while True:
        yield interval_s * numbers.uniform(0.5, 1.5)


def user_line(frame: FrameType | None) -> Line:
    """The innermost line that belongs to no installed package; if there is none, the innermost of all."""
    first = frame
    while frame is not None:
        if not is_library_code(frame.f_code.co_filename):
            return _line(frame)
        frame = frame.f_back
    assert first is not None
    return _line(first)


def is_library_code(file: str) -> bool:
    """Whether code belongs to Python, an installed package or this profiler: nothing its reader would change."""
    return file.startswith((*_INSTALLED_CODE, _PROFILER_CODE, "<frozen"))


def _line(frame: FrameType) -> Line:
    return Line(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def relative_location(where: str) -> str:
    """file:line relative to the working folder, if it lies inside it."""
    file, _, line = where.rpartition(":")
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except ValueError:
        return where
