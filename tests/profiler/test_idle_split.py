"""Idle time of a GPU is split into host, gaps and transfers, on timelines made by hand (microseconds)."""

from dataclasses import replace

import numpy as np
import pytest

from flatout.profiler.measurement import IdleSplit
from flatout.profiler.observe.device_times import TraceEvent, split_idle, union_length
from flatout.profiler.report.text import idle_lines
from tests.profiler.situations import measured, network, on_gpu


def test_a_device_without_work_waits_for_the_host():
    events = [
        TraceEvent("aten::conv2d", 0, 900, False, 7),
        TraceEvent("cudaLaunchKernel", 900, 910, False, 1),
        TraceEvent("conv", 920, 1020, True, 1),
        TraceEvent("cudaDeviceSynchronize", 1000, 2000, False),
    ]
    split = split_idle(events, num_steps=1)
    # 0.9 ms until the launch, and 0.98 ms after the kernel, in which nothing is queued.
    assert (split.host_ms, split.gap_ms, split.transfer_ms) == pytest.approx((1.88, 0.02, 0))


def test_time_between_queued_kernels_is_a_gap():
    launches = [TraceEvent("cudaLaunchKernel", 10.0 * n, 10.0 * n + 5, False, n) for n in range(1, 5)]
    kernels = [TraceEvent("relu", 100.0 * n, 100.0 * n + 60, True, n) for n in range(1, 5)]
    split = split_idle([*launches, *kernels], num_steps=2)
    # From the first launch to the first kernel, and three gaps of 40.
    assert (split.host_ms, split.gap_ms, split.transfer_ms) == pytest.approx((0, (90 + 120) / 2e3, 0))


def test_a_copy_without_a_kernel_is_a_transfer():
    events = [
        TraceEvent("cudaMemcpyAsync", 0, 5, False, 1),
        TraceEvent("Memcpy HtoD (Pinned -> Device)", 5, 505, True, 1),
        TraceEvent("cudaLaunchKernel", 6, 9, False, 2),
        TraceEvent("conv", 305, 705, True, 2),
    ]
    split = split_idle(events, num_steps=1)
    assert split.transfer_ms == pytest.approx(0.3), "the last 0.2 ms of the copy run next to a kernel"
    assert (split.host_ms, split.gap_ms) == pytest.approx((0, 0.005))


def test_busy_and_idle_time_add_up_to_the_trace():
    rng = np.random.default_rng(0)
    for _ in range(50):
        begins = np.sort(rng.uniform(0, 1e4, 30))
        names = rng.choice(["conv", "relu", "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoD"], 30)
        kernels = [
            TraceEvent(str(name), begin, begin + rng.uniform(1, 400), True, number)
            for number, (name, begin) in enumerate(zip(names, begins, strict=True), start=1)
        ]
        launches = [
            TraceEvent("cudaLaunchKernel", max(0, e.begin_us - rng.uniform(0, 900)), e.begin_us, False, e.correlation)
            for e in kernels
        ]
        events = [*kernels, *launches]
        split = split_idle(events, num_steps=1)
        computing = union_length((e.begin_us, e.end_us) for e in kernels if "HtoD" not in e.name)
        whole = max(e.end_us for e in events) - min(e.begin_us for e in events)
        assert split.host_ms + split.gap_ms + split.transfer_ms == pytest.approx((whole - computing) / 1e3)
        assert min(split.host_ms, split.gap_ms, split.transfer_ms) >= 0


def test_without_a_device_there_is_no_split():
    assert split_idle([], num_steps=1) == IdleSplit(host_ms=0.0, gap_ms=0.0, transfer_ms=0.0)


def test_the_report_gives_the_parts_of_the_idle_time_of_timed_steps():
    """Tracing makes steps longer: 20 ms of idle time in traced steps stand for 10 ms in timed ones."""
    split = IdleSplit(host_ms=12.0, gap_ms=6.0, transfer_ms=2.0)
    (line,) = idle_lines(replace(on_gpu(100, network(), 90), idle_split=split))
    assert line == (
        "GPU idle, 10.0 ms per step: the host queued nothing 6.00, gaps between kernels 3.00, copies from or to the "
        "host 1.00 ms"
    )
    assert idle_lines(measured(100, network())) == []
