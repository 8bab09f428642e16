"""Device events become times per stage and step, read back only at the end. (A real device: test_watch_gpu.py.)"""

import pytest
import torch

from flatout.profiler import clock
from flatout.profiler.device_clock import DeviceClock
from flatout.profiler.measurement import IDLE
from flatout.profiler.recorder import StepRecorder
from flatout.profiler.summary import device_lane


class FakeDevice:
    """A stream on which every event happens one millisecond after the one before."""

    def __init__(self):
        self.now_ms = 0.0
        self.num_waits = 0
        self.is_capturing = False

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
