"""A recorder separates steps, charges nothing twice, and leaves out the time between epochs."""

import gc
import sys
import time
from itertools import islice

import numpy as np
import pytest
import torch

import flatout.feed.feed
from flatout.clock import clock
from flatout.profiler.observe.device_times import (
    DeviceTrace,
    TraceEvent,
    _trace_events,
    self_times,
    summarize,
    union_length,
)
from flatout.profiler.observe.recorder import StepRecorder, installed_code, is_library_code, jittered, user_line


def run_steps(recorder, num_steps):
    for _ in range(num_steps):
        with clock.stage("outer"), clock.stage("inner"):
            time.sleep(0.002)
        with clock.stage("after"):
            pass
        clock.step_ended(4)


def test_self_times_add_up_to_the_time_that_marks_cover():
    recorder = StepRecorder()
    with recorder.recording():
        run_steps(recorder, 3)
    steps = recorder.steps()
    assert steps.names == ("inner", "outer", "after")
    assert steps.runs.tolist() == [[1, 1, 1]] * 3
    assert steps.images.tolist() == [4, 4, 4]
    assert (steps.self_ns >= 0).all()
    assert (steps.self_ns.sum(1) <= steps.wall_ns).all()
    inner, outer, _ = steps.self_ns.sum(0)
    assert inner > 6e6 > outer


def test_time_between_epochs_belongs_to_no_step():
    recorder = StepRecorder()
    with recorder.recording():
        run_steps(recorder, 2)
        with clock.stage("validate"):
            time.sleep(0.02)
        clock.step_ended(0)
        run_steps(recorder, 2)
    steps = recorder.steps()
    assert recorder.num_steps == len(steps.images) == 4
    assert steps.wall_ns.max() < 20e6
    assert steps.self_ns[:, steps.names.index("validate")].sum() == 0


def test_a_collection_is_subtracted_from_the_stage_it_interrupts():
    recorder = StepRecorder()
    with recorder.recording():
        with clock.stage("work"):
            gc.collect()
        clock.step_ended(1)
    steps = recorder.steps()
    times = dict(zip(steps.names, steps.self_ns[0], strict=True))
    assert times["gc"] > times["work"]
    assert recorder._on_collection not in gc.callbacks


class Collecting:
    """Marks on a device that run the garbage collector each time."""

    def opened(self, name):
        gc.collect()

    closed = opened

    def step_ended(self):
        pass


def test_a_collection_between_two_marks_is_subtracted_from_neither():
    recorder = StepRecorder(device=Collecting())
    with recorder.recording():
        run_steps(recorder, 2)
    steps = recorder.steps()
    assert (steps.self_ns >= 0).all()
    assert (steps.self_ns.sum(1) <= steps.wall_ns).all()
    assert steps.self_ns[:, steps.names.index("outer")].max() < 1e6


def test_a_collection_right_after_a_mark_has_read_its_time_is_subtracted_from_the_interrupted_stage(monkeypatch):
    """Python may run the collector wherever a call returns."""
    read_ns = time.perf_counter_ns

    def read_then_collect():
        now_ns = read_ns()
        if recorder._collecting is None:
            gc.collect()
        return now_ns

    recorder = StepRecorder()
    with recorder.recording():
        monkeypatch.setattr(clock.time, "perf_counter_ns", read_then_collect)
        run_steps(recorder, 2)
        monkeypatch.undo()
    steps = recorder.steps()
    assert (steps.self_ns >= 0).all()
    assert (steps.self_ns.sum(1) <= steps.wall_ns).all()


def test_only_the_last_steps_are_kept():
    recorder = StepRecorder(max_steps=3, timeline_events=5)
    with recorder.recording():
        run_steps(recorder, 6)
    assert len(recorder.steps().images) == 3
    assert len(recorder.timeline) == 5


def test_a_new_stage_in_a_late_step_counts_from_zero():
    recorder = StepRecorder()
    with recorder.recording():
        clock.step_ended(1)
        with clock.stage("late"):
            pass
        clock.step_ended(1)
    assert recorder.steps().runs.tolist() == [[0], [1]]


def test_self_ns_of_a_shared_table():
    totals = clock.Totals()
    totals.add("read", 100, 70)
    totals.add("decode", 70)
    assert clock.read_self_ns(totals.table) == {"read": 30, "decode": 70}


def test_device_times_do_not_count_nested_stages_twice():
    marks = [("assign", 1.0, 3.0, 1), ("loss", 0.0, 4.0, 0), ("backward", 4.0, 9.0, 0), ("loss", 9.0, 10.0, 0)]
    assert self_times(marks) == {"assign": 2.0, "loss": 3.0, "backward": 5.0}
    assert sum(self_times(marks).values()) == 10.0


def test_device_times_of_random_nesting_sum_to_the_outermost():
    rng = np.random.default_rng(1)
    for _ in range(50):
        marks, clock_now = [], 0.0

        def grow(depth, marks=marks):
            nonlocal clock_now
            begin = clock_now
            clock_now += rng.random()
            for _ in range(rng.integers(0, 3) if depth < 3 else 0):
                grow(depth + 1)
            clock_now += rng.random()
            marks.append((f"s{rng.integers(3)}", begin, clock_now, depth))

        grow(0)
        grow(0)
        assert sum(self_times(marks).values()) == pytest.approx(clock_now)


def test_a_trace_is_read_as_torch_recorded_it(monkeypatch):
    """Without a device the trace is empty of kernels, but it shows that this torch has the functions we use."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    trace = DeviceTrace()
    torch.ones(3).sum()
    assert trace.stop(1)[:3] == (0.0, 0.0, 0.0)
    names = {event.name for event in _trace_events(trace._profile.profiler.kineto_results.events())}
    assert "aten::sum" in names


def test_kernels_that_run_in_parallel_count_once():
    assert union_length([(0, 4), (2, 5), (7, 8), (7.5, 7.6)]) == 6
    events = [
        TraceEvent("cudaLaunchKernel", 0, 5, False),
        TraceEvent("cudaLaunchKernel", 6, 9, False),
        TraceEvent("conv", 1000, 3000, True),
        TraceEvent("relu", 2000, 4000, True),
        TraceEvent("Memcpy HtoD (Pageable -> Device)", 5000, 6000, True),
    ]
    work = summarize(events, num_steps=2)
    assert (work.busy_ms, work.copy_ms, work.launches) == (2.0, 0.5, 1.0)


@pytest.mark.parametrize("period_s", [0.01, 0.02, 0.04, 0.08])
def test_samples_do_not_lock_in_with_periodic_steps(period_s):
    at_s = np.cumsum(list(islice(jittered(0.04), 200)))
    assert at_s[-1] == pytest.approx(8, rel=0.1)
    assert 0.3 < np.mean(at_s % period_s < period_s / 2) < 0.7


def test_packages_of_another_environment_are_not_code_of_the_user():
    """As when an environment is made on a machine whose torch is kept."""
    found = installed_code(
        ["/opt/base/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages", "/home/me/bolts"]
    )
    assert {"/opt/base/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages"} < found
    assert "/home/me/bolts" not in found


def test_the_clock_is_not_code_of_the_user_in_a_checkout_either():
    """A sample inside the recorder belongs to the line that ended the step."""
    lines = []

    class Sampled(StepRecorder):
        def step_ended(self, num_images):
            lines.append(user_line(sys._getframe(1)))

    with clock.recording(Sampled()):
        clock.step_ended(4)
    assert [line.file for line in lines] == [__file__]
    assert not is_library_code(flatout.feed.feed.__file__), "lines of flatout itself are named by `flatout profile`"
