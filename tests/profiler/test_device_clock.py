"""Device events become times per stage and step, read back only at the end. (A real device: test_watch_gpu.py.)"""

import contextlib

import pytest
import torch

from flatout.clock import clock
from flatout.profiler.measurement import IDLE, make_ledger
from flatout.profiler.observe.device_times import DeviceClock, DeviceWork
from flatout.profiler.observe.recorder import StepRecorder
from flatout.profiler.observe.summary import device_lane


class FakeDevice:
    """A stream on which every event happens one millisecond after the one before."""

    def __init__(self):
        self.now_ms = 0.0
        self.num_waits = 0
        self.is_capturing = False
        self.stream = "compute"

    def wait(self):
        self.num_waits += 1

    def event(self, enable_timing):
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device):
        self._device = device

    def record(self):
        self._device.now_ms += 1
        self.at_ms = self._device.now_ms

    def synchronize(self):
        self._device.wait()

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(torch.cuda, "synchronize", fake.wait)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.stream)
    return fake


def test_stages_steps_and_nesting(device):
    marks = DeviceClock()
    waits = device.num_waits
    recorder = StepRecorder(device=marks)
    with recorder.recording():
        for _ in range(3):
            with clock.stage("train.loss"), clock.stage("assign"):
                pass
            with clock.stage("train.backward"):
                pass
            clock.step_ended(8)
    assert device.num_waits == waits  # nothing waits for the device while steps run
    steps = marks.read(skip=1)
    assert steps.names == ("assign", "train.loss", "train.backward")
    # begin loss, begin assign, end assign, end loss: 3 ms, of which 1 is the assignment.
    assert steps.self_ms.tolist() == [[1, 2, 1]] * 2
    assert steps.wall_ms.tolist() == [7, 7]
    lane = device_lane(steps)
    assert lane.stage_ms == {"assign": 1, "loss": 2, "backward": 1} and lane.rest == IDLE
    assert [event.depth for event in steps.timeline] == [1, 0, 0] * 3


def test_what_runs_beside_the_step_is_kept_apart(device):
    marks = DeviceClock()
    recorder = StepRecorder(device=marks)
    with recorder.recording():
        for _ in range(2):
            with clock.stage("train.wait"):
                device.stream = "copies"
                with clock.stage("transfer"):
                    pass
                device.stream = "compute"
            clock.step_ended(8)
    steps, beside = marks.read(), marks.read(other_streams=True)
    # begin wait, begin and end of the copy, end wait: a copy on another stream takes nothing off the wait.
    assert (steps.names, steps.self_ms.tolist()) == (("train.wait",), [[3], [3]])
    assert (beside.names, beside.self_ms.tolist()) == (("transfer",), [[1], [1]])
    assert [event.name for event in beside.timeline] == ["transfer"] * 2
    assert device_lane(beside, "copy").stage_ms == {"transfer": 1}


def test_a_stage_that_is_captured_into_a_graph_has_no_time(device):
    marks = DeviceClock()
    recorder = StepRecorder(device=marks)
    with recorder.recording():
        device.is_capturing = True
        with clock.stage("train.forward"):
            pass
        device.is_capturing = False
        with clock.stage("train.graph"):
            pass
        clock.step_ended(8)
    steps = marks.read()
    assert steps.names == ("train.graph",)
    assert steps.self_ms.tolist() == [[1]]


def test_a_host_that_runs_ahead_is_not_mistaken_for_a_fast_step(device, monkeypatch):
    """The host queues a step in no time; the device takes five milliseconds for it."""
    from flatout.profiler.observe import observation
    from flatout.profiler.observe import observation as module
    from flatout.profiler.observe.observation import Observation
    from flatout.profiler.observe.summary import WorkerObserver

    class NoTrace:
        def stop(self, num_steps):
            return DeviceWork(busy_ms=4.0, copy_ms=0.0, launches=10.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(observation, "DeviceTrace", NoTrace)
    monkeypatch.setattr(observation, "launch_us", lambda: 5.0)
    monkeypatch.setattr(observation, "machine_facts", dict)
    monkeypatch.setattr(module.WaitCounter, "counting", lambda self: contextlib.nullcontext())
    looking = Observation(WorkerObserver())
    looking.attach_device()
    with looking.observing():
        for _ in range(17):
            with clock.stage("forward"), clock.stage("loss"):
                pass
            clock.step_ended(8)
            looking.after_step()
            clock.step_ended(0)
    ledger = make_ledger(looking.measurement)
    assert ledger.step_ms == 5.0  # four marks and the step's end, one millisecond each
    assert ledger.ms("host", "ahead") == pytest.approx(5.0, abs=0.5)
    assert ledger.ms("device", "loss") == 1 and ledger.ms("device", "forward") == 2
    for place in ledger.places:
        assert sum(row.ms for row in ledger.lane(place)) == pytest.approx(ledger.step_ms)
