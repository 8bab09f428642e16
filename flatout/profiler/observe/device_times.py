"""GPU times of training steps: from events on its streams, and from a trace of a few steps.

    host   |forward|loss|backward|...          the host only queues work
    stream    |   forward    | loss |      backward      | ...

A mark records one event when a stage begins and one when it ends; nothing waits for the device until `read()`, after
the measured steps. The device time of a stage includes gaps in which the stream had nothing queued: only the trace
shows idle time. Marks on other streams (copies and augmentation that run concurrently with the step) are read
separately.

Dimension key:  S steps   K stages
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from flatout.clock import Event, owners
from flatout.profiler.measurement import IdleSplit


class DeviceSteps(NamedTuple):
    """Device time of S steps in K stages."""

    names: tuple[str, ...]
    self_ms: np.ndarray  # [S, K], without nested stages
    wall_ms: np.ndarray  # [S], from the end of one step to the end of the next on the stream
    timeline: list[Event]  # in time of the host's clock


class DeviceClock:
    """Stage marks of one thread as CUDA events, on its current stream and on others."""

    def __init__(self) -> None:
        """Read both clocks while the device is idle (host-device wait)."""
        import torch

        self._torch = torch
        self._stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        self._base = self._now()
        self._base.synchronize()
        self._base_ns = time.perf_counter_ns()
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
            is_other_stream = self._torch.cuda.current_stream() != self._stream
            self._marks.append((name, begin, end, len(self._open), is_other_stream))

    def step_ended(self) -> None:
        self._step_ends.append(self._now())
        self._step_marks.append(len(self._marks))

    @property
    def num_steps(self) -> int:
        return len(self._step_marks)

    def read(self, skip: int = 0, *, other_streams: bool = False) -> DeviceSteps:
        """Milliseconds per step and stage of everything recorded so far, without the first `skip` steps (host-device
        wait).

        Covers the stream that was current when the clock was made, or all others together (`other_streams`).
        """
        self._torch.cuda.synchronize()
        bounds = [0, *self._step_marks]
        ended = self._marks[: bounds[-1]]  # marks after the end of the last step belong to no step
        charged = owners([(name, depth) for name, _, _, depth, _ in ended])
        marks = [
            (name, self._base.elapsed_time(begin), self._base.elapsed_time(end), depth)
            if is_other_stream == other_streams
            else None
            for name, (_, begin, end, depth, is_other_stream) in zip(charged, ended, strict=True)
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
        # During the capture of a CUDA graph nothing runs, and an event would become part of the graph.
        if self._torch.cuda.is_current_stream_capturing():
            return None
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def self_times(marks: list[tuple[str, float, float, int]]) -> dict[str, float]:
    """Time per stage without nested stages; marks are (name, begin, end, depth), in the order of their ends."""
    total: dict[str, float] = defaultdict(float)
    inside: dict[int, float] = defaultdict(float)  # depth -> time of stages that ended there since the last outer end
    for name, begin, end, depth in marks:
        total[name] += (end - begin) - inside.pop(depth + 1, 0.0)
        inside[depth] += end - begin
    return dict(total)


# Trace: busy time, launches and copies of a few steps, from torch's profiler
#
# Tracing slows launches down, so these steps are not timed; the times of kernels are right all the same.

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""Prefixes of the calls that launch work."""


class DeviceWork(NamedTuple):
    """Work of the GPU per traced step."""

    busy_ms: float
    """Time in which at least one kernel or copy ran."""

    copy_ms: float
    """Copies between host and device."""

    launches: float
    idle: IdleSplit | None = None
    """Why nothing ran at other times. Tracing slows launches down, so its parts count, not their sum."""


class TraceEvent(NamedTuple):
    """One event of a trace, in microseconds."""

    name: str
    begin_us: float
    end_us: float
    on_device: bool
    correlation: int = 0
    """The same for a kernel and the call that launched it; 0: unknown."""


class DeviceTrace:
    """A trace of the GPU, begun and stopped between steps."""

    def __init__(self) -> None:
        """Begin tracing (host-device wait: kernels of earlier steps must not be counted)."""
        import torch

        activity = torch.profiler.ProfilerActivity
        # With one cycle there is nothing to accumulate, but without `acc_events` torch warns that it does not.
        self._profile = torch.profiler.profile(activities=[activity.CPU, activity.CUDA], acc_events=True)
        torch.cuda.synchronize()
        self._profile.__enter__()

    def stop(self, num_steps: int) -> DeviceWork:
        """End tracing when everything queued has run (host-device wait); returns work per step."""
        import torch

        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        # Raw events: torch takes seconds to build its own tree of tens of thousands of them.
        return summarize(_trace_events(self._profile.profiler.kineto_results.events()), num_steps)  # type: ignore[union-attr]


def summarize(events: Sequence[TraceEvent], num_steps: int) -> DeviceWork:
    """Numbers per step from the events of a trace (pure)."""
    on_device = [event for event in events if event.on_device]
    host_copies = [event for event in on_device if _is_host_copy(event)]
    launches = sum(event.name.startswith(_LAUNCHES) for event in events if not event.on_device)
    return DeviceWork(
        busy_ms=union_length((event.begin_us, event.end_us) for event in on_device) / 1e3 / num_steps,
        copy_ms=sum(event.end_us - event.begin_us for event in host_copies) / 1e3 / num_steps,
        launches=launches / num_steps,
        idle=split_idle(events, num_steps),
    )


def split_idle(events: Sequence[TraceEvent], num_steps: int) -> IdleSplit:
    """Why no kernel ran, for all time from the first event of a trace to the last (pure).

        host     ......|launch|.....................|launch|
        device         :      |kernel|::::::::::::::|......|kernel|
                 host  : gap         :     host     : gap  :

    Until the call that launches the next kernel begins, the device has nothing to do; from then on the time is a gap.
    If that call was made before the device became idle, all of the time is a gap.
    """
    if not events:
        return IdleSplit(host_ms=0.0, gap_ms=0.0, transfer_ms=0.0)
    # Calls of CUDA only: other host events number themselves independently.
    calls = [event for event in events if not event.on_device and event.name.startswith("cu")]
    launched_us = {event.correlation: event.begin_us for event in calls if event.correlation}
    on_device = sorted((event for event in events if event.on_device), key=lambda event: event.begin_us)
    copies = [event for event in on_device if _is_host_copy(event)]
    begin_us, end_us = min(event.begin_us for event in events), max(event.end_us for event in events)
    busy_us = union_length((event.begin_us, event.end_us) for event in on_device)
    kernels_us = union_length((event.begin_us, event.end_us) for event in on_device if not _is_host_copy(event))
    host_us, reached_us = 0.0, begin_us
    for event in on_device:
        if event.begin_us > reached_us:
            queued_us = launched_us.get(event.correlation, event.begin_us)
            host_us += min(max(queued_us, reached_us), event.begin_us) - reached_us
        reached_us = max(reached_us, event.end_us)
    host_us += end_us - reached_us
    return IdleSplit(
        host_ms=host_us / 1e3 / num_steps,
        gap_ms=max(0.0, end_us - begin_us - busy_us - host_us) / 1e3 / num_steps,
        transfer_ms=(busy_us - kernels_us) / 1e3 / num_steps if copies else 0.0,
    )


def _is_host_copy(event: TraceEvent) -> bool:
    return event.name.startswith("Memcpy") and ("HtoD" in event.name or "DtoH" in event.name)


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans: time in which several kernels run counts once."""
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
            event.correlation_id(),
        )
        for event in events
        # Named ranges (such as an optimizer's step) appear on the device too, but nothing runs for them.
        if not event.is_user_annotation()
    ]
