"""What did the GPU do in a few steps? Busy time, launches and copies, from torch's own trace.

Tracing slows launching down, so these steps are not timed; what kernels take is right all the same.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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
        return sum_up(_entries(self._profile.profiler.kineto_results.events()), num_steps)  # type: ignore[union-attr]


def sum_up(events: Sequence[TraceEvent], num_steps: int) -> DeviceWork:
    """Pure: entries of a trace -> numbers per step."""
    on_device = [event for event in events if event.on_device]
    copies = [event for event in on_device if event.name.startswith("Memcpy")]
    host_copies = [event for event in copies if "HtoD" in event.name or "DtoH" in event.name]
    launches = sum(event.name.startswith(_LAUNCHES) for event in events if not event.on_device)
    return DeviceWork(
        busy_ms=covered((event.begin_us, event.end_us) for event in on_device) / 1e3 / num_steps,
        copy_ms=sum(event.end_us - event.begin_us for event in host_copies) / 1e3 / num_steps,
        launches=launches / num_steps,
        pageable_copies=sum("Pageable" in event.name for event in copies) / num_steps,
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some spans: kernels that run side by side are busy once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _entries(events: Iterable[Any]) -> list[TraceEvent]:
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
