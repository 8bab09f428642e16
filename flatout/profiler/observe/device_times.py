"""What the GPU did and how long it took: events on its stream, and a trace of a few steps.

    host   |forward|loss|backward|...          the host only queues
    stream    |   forward    | loss |      backward      | ...

A mark records one event when a stage begins and one when it ends; nothing waits for the device until
`read()`, after the measured steps. A stage's device time includes gaps in which the stream had nothing
queued: that it was idle is seen in the trace, not here. Marks on other streams (copies and
augmentation that run beside the step) are kept apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from flatout.clock import Event, owners


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


# What did the GPU do in a few steps? Busy time, launches and copies, from torch's own trace.
#
# Tracing slows launching down, so these steps are not timed; what kernels take is right all the same.

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""How the names of launching calls begin."""


class DeviceWork(NamedTuple):
    """Per traced step."""

    busy_ms: float
    """At least one kernel or copy ran."""

    copy_ms: float
    """Copies between host and device."""

    launches: float
    pageable_copies: float
    """Copies from or to memory that is not page-locked: each makes the host wait."""


class TraceEvent(NamedTuple):
    """One entry of a trace, in microseconds."""

    name: str
    begin_us: float
    end_us: float
    on_device: bool


class DeviceTrace:
    """A trace that is started and stopped between steps."""

    def __init__(self) -> None:
        import torch

        activity = torch.profiler.ProfilerActivity
        # With one cycle there is nothing to gather; but without `acc_events` torch warns that it gathers nothing.
        self._profile = torch.profiler.profile(activities=[activity.CPU, activity.CUDA], acc_events=True)

    def start(self) -> None:
        """Host-device wait: kernels of the steps before must not be counted."""
        import torch

        torch.cuda.synchronize()
        self._profile.__enter__()

    def stop(self, num_steps: int) -> DeviceWork:
        """Host-device wait: the trace ends when everything queued has run."""
        import torch

        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        # As they were recorded: torch takes seconds to make its own tree of tens of thousands of them.
        return summarize(_trace_events(self._profile.profiler.kineto_results.events()), num_steps)  # type: ignore[union-attr]


def summarize(events: Sequence[TraceEvent], num_steps: int) -> DeviceWork:
    """Pure: entries of a trace -> numbers per step."""
    on_device = [event for event in events if event.on_device]
    copies = [event for event in on_device if event.name.startswith("Memcpy")]
    host_copies = [event for event in copies if "HtoD" in event.name or "DtoH" in event.name]
    launches = sum(event.name.startswith(_LAUNCHES) for event in events if not event.on_device)
    return DeviceWork(
        busy_ms=union_length((event.begin_us, event.end_us) for event in on_device) / 1e3 / num_steps,
        copy_ms=sum(event.end_us - event.begin_us for event in host_copies) / 1e3 / num_steps,
        launches=launches / num_steps,
        pageable_copies=sum("Pageable" in event.name for event in copies) / num_steps,
    )


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some spans: kernels that run side by side are busy once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _trace_events(events: Iterable[Any]) -> list[TraceEvent]:
    return [
        TraceEvent(
            event.name(),
            event.start_ns() / 1e3,
            (event.start_ns() + event.duration_ns()) / 1e3,
            "CUDA" in str(event.device_type()),
        )
        for event in events
        # Ranges that somebody named (an optimizer's step) are drawn on the device too, but nothing runs for them.
        if not event.is_user_annotation()
    ]


# A trace of whole steps: it ends where a pause between steps begins, and begins anew if nothing was traced by then.


class StepTrace:
    """The trace that runs, if any, and what the last one told."""

    def __init__(self) -> None:
        self.work: DeviceWork | None = None
        """Per step; None: nothing was traced."""
        self._trace: DeviceTrace | None = None

    @property
    def is_running(self) -> bool:
        return self._trace is not None

    def start(self) -> None:
        """Host-device wait."""
        trace = DeviceTrace()
        trace.start()
        self._trace = trace  # only now: one that did not start cannot be stopped

    def stop(self, num_steps: int) -> None:
        """Host-device wait, if there is a trace. One of no step at all is thrown away."""
        if self._trace is not None:
            work = self._trace.stop(max(1, num_steps))
            self.work = work if num_steps else None
            self._trace = None
