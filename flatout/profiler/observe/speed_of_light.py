"""Hardware limits ("speed of light") of this machine: copies, launches and decoding, measured in a second or two.

A stage that is near one of these limits cannot be made faster by better code, only by doing less.
"""

import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COPY_BYTES = 64 << 20
LAUNCHES = 2000


@dataclass(frozen=True, kw_only=True)
class SpeedOfLight:
    """Rates of this machine; None: it has no such part, or the rate was not measured."""

    host_copy_gb_s: float
    """One core, large blocks."""

    decode_mpx_s: float | None = None
    """One core."""

    to_device_gb_s: float | None = None
    """From pinned host memory."""

    device_copy_gb_s: float | None = None
    """Bytes read plus bytes written."""

    launch_us: float | None = None

    def rows(self) -> list[tuple[str, float, str]]:
        """(name, value, unit) of everything that was measured."""
        rows = [
            ("host memory copy, one core", self.host_copy_gb_s, "GB/s"),
            ("image decoding, one core", self.decode_mpx_s, "Mpx/s"),
            ("host to device, pinned memory", self.to_device_gb_s, "GB/s"),
            ("device memory", self.device_copy_gb_s, "GB/s"),
            ("one kernel launch", self.launch_us, "us"),
        ]
        return [(name, value, unit) for name, value, unit in rows if value is not None]

    def lines(self) -> list[str]:
        """The rows as aligned text."""
        return [f"{name:<32}{value:10,.1f} {unit}" for name, value, unit in self.rows()]


def measure_machine(decode: Callable[[Any], np.ndarray] | None = None, samples: Sequence[Any] = ()) -> SpeedOfLight:
    """Measure this machine. `decode` turns one of `samples` (contents of a file, for example) into an image
    [H, W, ...]."""
    return SpeedOfLight(
        host_copy_gb_s=host_copy_gb_s(),
        decode_mpx_s=decode_mpx_s(decode, samples) if decode is not None and samples else None,
        **_device_rates(),
    )


def host_copy_gb_s() -> float:
    """Bytes copied per second by one core, large blocks."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    return COPY_BYTES / 1e9 / _best_s(lambda: np.copyto(target, source))


def decode_mpx_s(decode: Callable[[Any], np.ndarray], samples: Sequence[Any], seconds: float = 0.5) -> float:
    """Million pixels per second that one core decodes, going round the samples for this many seconds."""
    decode(samples[0])
    begin_s, pixels, number = time.perf_counter(), 0, 0
    while time.perf_counter() - begin_s < seconds:
        image = decode(samples[number % len(samples)])
        pixels += image.shape[0] * image.shape[1]
        number += 1
    return pixels / 1e6 / (time.perf_counter() - begin_s)


def _device_rates() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {}
    pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return {
        "to_device_gb_s": COPY_BYTES / 1e9 / _device_s(lambda: source.copy_(pinned, non_blocking=True)),
        "device_copy_gb_s": 2 * COPY_BYTES / 1e9 / _device_s(lambda: target.copy_(source)),
        "launch_us": launch_us(),
    }


def launch_us() -> float:
    """Host time of one kernel launch, from many tiny kernels in a row (host-device wait)."""
    import torch

    small = torch.zeros(1, device="cuda")

    def launches() -> None:
        for _ in range(LAUNCHES):
            small.add_(1)

    return 1e6 * _device_s(launches) / LAUNCHES


def _device_s(work: Callable[[], object]) -> float:
    import torch

    def drained() -> None:
        work()
        torch.cuda.synchronize()

    return _best_s(drained)


def _best_s(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of several calls, after one that is not timed: other programs only make calls slower."""
    work()
    return min(timeit.repeat(work, number=1, repeat=repeats))
