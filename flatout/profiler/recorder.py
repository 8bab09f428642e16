"""What each training step spent where: a clock recorder that tells steps apart and keeps a timeline.

    recorder = StepRecorder()
    with recorder.recording():
        for batch in batches:
            ...                                # marks: clock.stage("forward"), ...
            clock.step_ended(len(batch))

Per step it copies one small table (a few microseconds). Begin and end of every stage are kept for the
last steps only, so that a recorder may stay installed for a whole run. Pauses of Python's garbage
collector appear as the stage "gc", taken off the stage they interrupt.
"""

import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from flatout.profiler import clock

GC = "gc"


class Event(NamedTuple):
    """One stage on a timeline, in nanoseconds of time.perf_counter_ns(); `depth` 0 is outermost."""

    name: str
    begin_ns: int
    end_ns: int
    depth: int


class Steps(NamedTuple):
    """What S steps spent in K stages on one thread."""

    begin_ns: np.ndarray  # [S] int64
    end_ns: np.ndarray  # [S] int64
    images: np.ndarray  # [S] int64
    cpu_ns: np.ndarray  # [S] int64: CPU time of the whole process, all threads
    names: tuple[str, ...]  # [K]
    runs: np.ndarray  # [S, K] int64
    self_ns: np.ndarray  # [S, K] int64, without the stages inside

    @property
    def wall_ns(self) -> np.ndarray:
        """[S]."""
        return np.asarray(self.end_ns - self.begin_ns)


class DeviceMarks(Protocol):
    """Marks on a device's own timeline; see device_clock.py."""

    def opened(self, name: str) -> None: ...
    def closed(self, name: str) -> None: ...
    def step_ended(self) -> None: ...


class StepRecorder(clock.Totals):
    """Takes one thread's marks, and where each step ends."""

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
        self.timeline: deque[Event] = deque(maxlen=timeline_events)
        self.device = device
        self._depth = 0
        self._collecting: Any = None
        # A boundary is the end of one step and the begin of the next: one more of them than of steps.
        self._snapshots: deque[np.ndarray] = deque(maxlen=max_steps + 1)
        self._cpu_ns: deque[int] = deque(maxlen=max_steps + 1)
        self._ends_ns: deque[int] = deque(maxlen=max_steps + 1)
        self._images: deque[int] = deque(maxlen=max_steps)
        self.restart()

    def restart(self) -> None:
        """Forget all steps; the next one begins now."""
        for kept in (self._snapshots, self._images, self._cpu_ns, self._ends_ns):
            kept.clear()
        self.timeline.clear()
        self._snapshots.append(self.table.copy())
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

    def opened(self, name: str) -> None:
        self._depth += 1
        if self.device is not None and name != GC:  # a pause of the host is nothing on the device
            self.device.opened(name)

    def closed(self, name: str, begin_ns: int, end_ns: int, inside_ns: int) -> None:
        self._depth -= 1
        self.add(name, end_ns - begin_ns, inside_ns)
        self.timeline.append(Event(name, begin_ns, end_ns, self._depth))
        if self.device is not None and name != GC:
            self.device.closed(name)

    def step_ended(self, num_images: int) -> None:
        """`num_images` 0: the time since the last step's end belongs to no step (it lies between epochs, say)."""
        self._ends_ns.append(time.perf_counter_ns())
        self._cpu_ns.append(time.process_time_ns())
        self._images.append(num_images)
        self._snapshots.append(self.table.copy())
        if self.device is not None:
            self.device.step_ended()

    @property
    def num_steps(self) -> int:
        return sum(images > 0 for images in self._images)

    def is_step(self) -> np.ndarray:
        """Of each interval that is kept, bool [S + those between steps]: whether it is a step."""
        return np.array(self._images) > 0

    def steps(self) -> Steps:
        """All steps that have ended."""
        names = tuple(clock.read_totals(self.table))
        tables = np.stack([snapshot[: len(names)] for snapshot in self._snapshots])  # [S + 1, K]
        grown = {column: np.diff(tables[column], axis=0) for column in ("runs", "total_ns", "inside_ns")}
        ends_ns, images = np.array(self._ends_ns, np.int64), np.array(self._images, np.int64)
        real = self.is_step()
        return Steps(
            begin_ns=ends_ns[:-1][real],
            end_ns=ends_ns[1:][real],
            images=images[real],
            cpu_ns=np.diff(np.array(self._cpu_ns, np.int64))[real],
            names=names,
            runs=grown["runs"][real],
            self_ns=(grown["total_ns"] - grown["inside_ns"])[real],
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
