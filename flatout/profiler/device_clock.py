"""How long do stages take on the GPU itself? Events on the stream, read back late.

    host   |forward|loss|backward|...          the host only queues
    stream    |   forward    | loss |      backward      | ...

A mark records one event when a stage begins and one when it ends; nothing waits for the device until
`read()`, after the measured steps. A stage's device time includes gaps in which the stream had nothing
queued: that it was idle is seen in the trace (device_trace.py), not here. Marks on other streams (copies and
augmentation that run beside the step) are kept apart.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from flatout.profiler.pauses import owners
from flatout.profiler.recorder import Event


class DeviceSteps(NamedTuple):
    """Device time of S steps in K stages."""

    names: tuple[str, ...]
    self_ms: np.ndarray  # [S, K], without the stages inside
    wall_ms: np.ndarray  # [S], from one step's end to the next on the stream
    timeline: list[Event]  # on the host's clock


class DeviceClock:
    """Marks on the current CUDA stream of one thread."""

    def __init__(self, base_host_ns: int | None = None) -> None:
        """Host-device wait: both clocks are read at a moment when the device is idle."""
        import time

        import torch

        self._torch = torch
        self._stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        self._base = self._now()
        self._base.synchronize()
        self._base_ns = time.perf_counter_ns() if base_host_ns is None else base_host_ns
        self._open: list[tuple[str, Any]] = []
        self._marks: list[tuple[str, Any, Any, int, bool]] = []  # name, begin, end, depth, on another stream
        self._step_marks: list[int] = []  # marks made before each step's end
        self._step_ends = [self._base]

    def opened(self, name: str) -> None:
        self._open.append((name, self._now()))

    def closed(self, name: str) -> None:
        opened_name, begin = self._open.pop()
        assert opened_name == name
        end = self._now()
        if begin is not None and end is not None:
            beside = self._torch.cuda.current_stream() != self._stream
            self._marks.append((name, begin, end, len(self._open), beside))

    def step_ended(self) -> None:
        self._step_ends.append(self._now())
        self._step_marks.append(len(self._marks))

    @property
    def num_steps(self) -> int:
        return len(self._step_marks)

    def read(self, skip: int = 0, *, beside: bool = False) -> DeviceSteps:
        """Host-device wait: everything recorded so far, as milliseconds per step and stage.

        Of the stream on which the clock was made, or of all others together (`beside`).
        """
        self._torch.cuda.synchronize()
        bounds = [0, *self._step_marks]
        ended = self._marks[: bounds[-1]]  # what comes after the last step's end belongs to no step
        charged = owners([(name, depth) for name, _, _, depth, _ in ended])
        marks = [
            (name, self._base.elapsed_time(begin), self._base.elapsed_time(end), depth) if apart == beside else None
            for name, (_, begin, end, depth, apart) in zip(charged, ended, strict=True)
        ]
        ends_ms = np.array([self._base.elapsed_time(end) for end in self._step_ends])
        per_step = [
            self_times([mark for mark in marks[bounds[s] : bounds[s + 1]] if mark is not None])
            for s in range(skip, len(self._step_marks))
        ]
        names = tuple(dict.fromkeys(name for times in per_step for name in times))
        shape = len(per_step), len(names)
        timeline = [
            Event(name, self._base_ns + int(1e6 * begin), self._base_ns + int(1e6 * end), depth)
            for name, begin, end, depth in filter(None, marks)
        ]
        return DeviceSteps(
            names=names,
            self_ms=np.array([[times.get(name, 0.0) for name in names] for times in per_step]).reshape(shape),
            wall_ms=np.diff(ends_ms)[skip:],
            timeline=timeline,
        )

    def _now(self) -> Any:
        # While a CUDA graph is captured nothing runs, and an event would become part of the graph.
        if self._torch.cuda.is_current_stream_capturing():
            return None
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def self_times(marks: list[tuple[str, float, float, int]]) -> dict[str, float]:
    """Time per stage without the stages inside it; marks are (name, begin, end, depth), in order of their ends."""
    total: dict[str, float] = defaultdict(float)
    inside: dict[int, float] = defaultdict(float)  # depth -> time of stages that ended there since the last outer end
    for name, begin, end, depth in marks:
        total[name] += (end - begin) - inside.pop(depth + 1, 0.0)
        inside[depth] += end - begin
    return dict(total)
