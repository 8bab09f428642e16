"""Stage times per training step, and a sampler of the running code line.

    recorder = StepRecorder()
    with recorder.recording():
        for batch in batches:
            ...                                # marks: clock.stage("forward"), ...
            clock.step_ended(len(batch))

Begin and end of every stage are kept for the last steps only, so that a recorder may stay installed for a whole run.
Garbage collections appear as the stage "gc", subtracted from the stage they interrupt.

A mark only stores its times; everything else is computed when it is read. After a millisecond of matrix products
nothing of Python is left in a core's caches, and a line that runs there costs several times what it costs in a loop
(bench/profiler_overhead.py).

The sampler is a thread that looks at the running line of another one every few dozen milliseconds. It covers code
without marks. A sample is charged to the innermost frame that is not part of Python, torch or another installed
package, so it names a line that the user can change. C code that holds the GIL is sampled when it releases it, at the
line that called it.

Dimension key:  S steps   K stages
"""

import gc
import os
import random
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flatout.clock import ALL_PAUSES, Event, clock, owners

if TYPE_CHECKING:
    from flatout.profiler.observe.device_times import DeviceClock

GC = "gc"
CHARGED_AT_ONCE = 4096
"""Marks that are collected before they are charged to the table."""

Note = tuple[str, int, int, int, int]
"""A mark that has ended: name, begin, end, time of nested stages, depth."""


class Steps(NamedTuple):
    """Times of S steps in K stages on one thread."""

    begin_ns: np.ndarray  # [S] int64
    end_ns: np.ndarray  # [S] int64
    images: np.ndarray  # [S] int64
    cpu_ns: np.ndarray  # [S] int64: CPU time of the whole process, all threads
    names: tuple[str, ...]  # [K]
    runs: np.ndarray  # [S, K] int64
    self_ns: np.ndarray  # [S, K] int64, without nested stages; a pause includes all but nested pauses

    @property
    def wall_ns(self) -> np.ndarray:
        """[S]."""
        return np.asarray(self.end_ns - self.begin_ns)


class StepRecorder(clock.Totals):
    """Records the stages of one thread, step by step, and a timeline of the last steps."""

    on_pause: Callable[[], None] = staticmethod(lambda: None)
    """Called when an outermost pause begins."""

    def __init__(
        self,
        *,
        device: "DeviceClock | None" = None,
        max_steps: int = 2000,
        timeline_events: int = 4096,
    ) -> None:
        """The last `max_steps` steps are kept, and the last `timeline_events` stages. Marks are also given to
        `device`, which has a timeline of its own."""
        super().__init__()
        self.device = device
        self._timeline_events = timeline_events
        self._depth = 0
        self._open_pauses = 0
        self._noted: list[Note] = []  # of the current step
        self._uncharged: list[Note] = []
        self._collecting: Any = None
        self._notes: deque[list[Note]] = deque(maxlen=max_steps)  # of each step
        # Each boundary ends one step and begins the next: one more of them than of steps.
        self._cpu_ns: deque[int] = deque(maxlen=max_steps + 1)
        self._ends_ns: deque[int] = deque(maxlen=max_steps + 1)
        self._images: deque[int] = deque(maxlen=max_steps)
        self.restart()

    def restart(self) -> None:
        """Discard all steps; the next one begins now."""
        self.charge()
        for kept in (self._notes, self._images, self._cpu_ns, self._ends_ns):
            kept.clear()
        self._cpu_ns.append(time.process_time_ns())
        self._ends_ns.append(time.perf_counter_ns())

    @contextmanager
    def recording(self) -> Iterator["StepRecorder"]:
        """Record this thread inside the block; the first step begins here."""
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
        if name in ALL_PAUSES:
            self._open_pauses += 1
            if self._open_pauses == 1:
                self.on_pause()
        if self.device is not None and name != GC:  # a collection concerns the host alone
            self.device.opened(name)

    def closed(self, name: str, begin_ns: int, end_ns: int, nested_ns: int) -> None:
        self._depth -= 1
        self._noted.append((name, begin_ns, end_ns, nested_ns, self._depth))
        if name in ALL_PAUSES:
            self._open_pauses -= 1
        if self.device is not None and name != GC:
            self.device.closed(name)

    def step_ended(self, num_images: int) -> None:
        """End a step. `num_images` 0: the time since the last step belongs to no step (as between epochs)."""
        # First: a garbage collection during one of the calls below belongs to the next step.
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
        for name, begin_ns, end_ns, nested_ns, _ in notes:
            self.add(name, end_ns - begin_ns, nested_ns)

    @property
    def timeline(self) -> list[Event]:
        """The last stages of steps that have ended, in the order of their ends."""
        notes = list(chain(*self._notes))[-self._timeline_events :]
        return [Event(name, begin_ns, end_ns, depth) for name, begin_ns, end_ns, _, depth in notes]

    @property
    def num_steps(self) -> int:
        return sum(images > 0 for images in self._images)

    def is_step(self) -> np.ndarray:
        """Whether each interval that is kept is a step or lies between steps, bool [intervals]."""
        return np.array(self._images) > 0

    def steps(self) -> Steps:
        """All steps that have ended."""
        names = tuple(dict.fromkeys(note[0] for note in chain(*self._notes)))
        column = {name: number for number, name in enumerate(names)}
        runs, self_ns = (np.zeros((len(self._notes), len(names)), np.int64) for _ in range(2))
        for step, notes in enumerate(self._notes):
            charged = owners([(note[0], note[4]) for note in notes])
            for (name, begin_ns, end_ns, nested_ns, _), owner in zip(notes, charged, strict=True):
                runs[step, column[name]] += owner == name
                self_ns[step, column[owner]] += end_ns - begin_ns - nested_ns
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
        # Collections in other threads stop this one too, but they are charged to no stage.
        if clock._thread.recorder is not self:
            return
        if phase == "start":
            self._collecting = clock.stage(GC)
            self._collecting.__enter__()
        elif self._collecting is not None:
            self._collecting.__exit__(None, None, None)
            self._collecting = None


# Sampler


def installed_code(search_path: Sequence[str]) -> set[str]:
    """Folders of Python and of installed packages; an environment may use the torch of another one."""
    packages = {folder for folder in search_path if Path(folder).name in ("site-packages", "dist-packages")}
    return packages | {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


_INSTALLED_CODE = tuple(installed_code(sys.path))
_PACKAGE = Path(__file__).parents[2]
_PROFILER_CODE = (f"{_PACKAGE / 'profiler'}{os.sep}", f"{_PACKAGE / 'clock'}{os.sep}")
"""Code that runs because of the observation, also if flatout is used from a checkout and is no installed package."""

SAMPLE_INTERVAL_S = 0.04
"""A sample takes 0.1 to 0.17 ms of a core (mostly for the wake-up): every 40 ms that is at most 0.4 per cent."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that runs Python may delay a sample. With the default of 5 ms, most code has called something that
releases the GIL by then, and that line would be sampled instead of those that took the time."""


class Line(NamedTuple):
    """A code line and the function it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Sampler:
    """Samples the running line of the thread that creates it. `close()` may be called twice."""

    def __init__(
        self,
        on_sample: Callable[[Line, str | None], None],
        *,
        label: Callable[[], str | None],
        functions: Mapping[CodeType, str] | None = None,
    ) -> None:
        """Start sampling. `on_sample` gets the running line and its stage, in the sampling thread.

        `label` returns the stage that the sampled thread is in; if it returns None, the innermost function on the stack
        that is in `functions` (code -> stage) decides.
        """
        self._thread_id = threading.get_ident()
        self._on_sample, self._label, self._functions = on_sample, label, functions or {}
        # Held until the sampler is closed. Waking up from a lock costs half of waking up from an Event.
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

    def _run(self) -> None:
        waits_s, last_s = jittered(SAMPLE_INTERVAL_S), time.monotonic()
        while not self._open_lock.acquire(timeout=next(waits_s)):
            frame = sys._current_frames().get(self._thread_id)
            # C code that holds the GIL delays a sample; one that comes late counts for those that it replaces.
            now_s = time.monotonic()
            times, last_s = max(1, round((now_s - last_s) / SAMPLE_INTERVAL_S)), now_s
            if frame is not None:
                line, label = user_line(frame), self._label() or self._function(frame)
                for _ in range(times):
                    self._on_sample(line, label)

    def _function(self, frame: FrameType) -> str | None:
        callers = callers_of(frame) if self._functions else ()
        return next((self._functions[each.f_code] for each in callers if each.f_code in self._functions), None)


def jittered(interval_s: float) -> Iterator[float]:
    """Intervals of `interval_s` on average; even ones would sample steps of that length at the same line each time."""
    numbers = random.Random(0)
    while True:
        yield interval_s * numbers.uniform(0.5, 1.5)


def callers_of(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame itself, the one that called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_line(frame: FrameType) -> Line:
    """The innermost line outside of installed packages; if there is none, the innermost of all."""
    return _line(next((each for each in callers_of(frame) if not is_library_code(each.f_code.co_filename)), frame))


def is_library_code(file: str) -> bool:
    """Whether a file belongs to Python, an installed package or this profiler, that is, not to the user's code."""
    return file.startswith((*_INSTALLED_CODE, *_PROFILER_CODE, "<frozen"))


def _line(frame: FrameType) -> Line:
    code = frame.f_code
    return Line(code.co_filename, frame.f_lineno or _line_before(code, frame.f_lasti), code.co_name)


def _line_before(code: CodeType, instruction: int) -> int:
    """The last line up to an instruction that belongs to none, such as the jump at the end of a loop."""
    lines = [line for begin, _, line in code.co_lines() if line is not None and begin <= instruction]
    return lines[-1] if lines else code.co_firstlineno


def relative_location(where: str) -> str:
    """file:line relative to the working folder, if the file is inside it."""
    file, _, line = where.rpartition(":")
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except ValueError:
        return where
