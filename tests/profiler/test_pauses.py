"""Work between steps is timed under its own name, and never counted as part of a step."""

import contextlib
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flatout import Feed, FeedConfig, Plan
from flatout.clock import clock, worker_registry
from flatout.clock.clock import Event, is_pause, label_of, owners
from flatout.profiler import watch
from flatout.profiler.measurement import WaitBetween, WaitSite
from flatout.profiler.observe import observation
from flatout.profiler.observe.device_times import DeviceWork
from flatout.profiler.observe.engine_steps import EngineObservation
from flatout.profiler.observe.observation import ALL_PHASES, Observation
from flatout.profiler.observe.recorder import StepRecorder
from flatout.profiler.observe.summary import WorkerObserver
from flatout.profiler.observe.waits import WaitCounter
from flatout.profiler.outcome import load_measurement, save_report
from flatout.profiler.report.page import timeline_svg
from flatout.profiler.verdict import diagnose
from tests.profiler import slow_loops
from tests.profiler.situations import SITUATIONS
from tests.profiler.test_engine_steps import Numbers


def read_numbers(count):
    for number in torch.zeros(count):
        number.item()


def train(num_epochs, *, steps_per_epoch=4, feed=None, log_every=None):
    """The engine's marks; one number is read in every step, and very many in the validation after each epoch."""
    for epoch in range(num_epochs):
        batches = iter(feed.epoch(epoch)) if feed else None
        for step in range(steps_per_epoch):
            with clock.stage("train.wait"):
                if batches:
                    next(batches)
            with clock.stage("train.forward"):
                read_numbers(1)
                time.sleep(0.002)
            if log_every and step % log_every == 0:
                with clock.stage("train.log"):
                    read_numbers(3)
        with clock.stage("train.between"):
            read_numbers(2)
            with clock.stage("train.pictures"):
                read_numbers(20)
            with clock.stage("train.validate"):
                with clock.stage("feed.wait"):
                    time.sleep(0.01)
                with clock.stage("decode"):
                    read_numbers(100)


def observed(num_epochs=6, **how):
    observation = EngineObservation(images_per_step=8, num_steps=None)
    with observation.observing():
        train(num_epochs, **how)
    return observation.profile


def test_waits_between_steps_are_counted_apart():
    """The second of the two counted steps is the last of an epoch."""
    measurement = observed().measurement
    assert sum(site.per_step for site in measurement.waits) == 1
    apart = {site.stage: site.times for site in measurement.waits_between}
    assert apart == {"validate": 100, "pictures": 20, "between": 2}


def test_plots_and_pictures_are_names_of_the_same_pause():
    assert is_pause("plots") and is_pause("pictures")
    assert label_of("plots") == label_of("train.pictures") == "plots"


@pytest.mark.parametrize(("log_every", "per_step"), [(1, 4), (4, 1)])
def test_a_log_counts_as_part_of_a_step_if_it_comes_with_every_one(log_every, per_step):
    measurement = observed(steps_per_epoch=8, log_every=log_every).measurement
    assert sum(site.per_step for site in measurement.waits) == per_step


def test_a_verdict_separates_steps_from_what_happens_between_them():
    profile = observed(11)
    assert profile.verdict.cause == "validation", profile.text()
    assert "every 4 steps" in profile.text() and "100  validation:" in profile.text()


def test_waiting_for_the_images_of_a_validation_is_validation():
    ledger = observed().ledger
    assert ledger.ms("host", "decode") == 0
    assert ledger.ms("host", "feed.wait") < 1
    # Once per four steps, 10 ms and more; that of the last epoch is not observed.
    assert ledger.ms("host", "validate") > 0.8 * 10 / 4
    assert ledger.lane("host")[-1].share < 0.1


def test_marks_inside_a_pause_are_charged_to_it():
    marks = [("decode", 2), ("feed.wait", 1), ("train.save", 1), ("train.validate", 0), ("forward", 0)]
    assert owners(marks) == ["train.validate", "train.validate", "train.save", "train.validate", "forward"]
    assert owners([("loss", 1), ("forward", 0)]) == ["loss", "forward"]
    assert owners([]) == []


def test_no_time_is_lost_or_charged_twice_however_pauses_nest():
    rng = np.random.default_rng(4)
    names = ["forward", "loss", "train.validate", "train.between", "gc"]

    def grow(depth):
        with clock.stage(names[rng.integers(len(names))]):
            for _ in range(rng.integers(0, 3) if depth < 3 else 0):
                grow(depth + 1)

    recorder = StepRecorder()
    with recorder.recording():
        for _ in range(40):
            grow(0)
            clock.step_ended(1)
    outermost_ns = sum(event.end_ns - event.begin_ns for event in recorder.timeline if event.depth == 0)
    assert recorder.steps().self_ns.sum() == outermost_ns


def test_a_pass_over_another_loader_is_no_part_of_a_watched_step():
    """Validation in a loop of the user, between the third and the fourth step: where waits are counted."""
    loader, model = DataLoader(slow_loops.ready_samples(24), batch_size=8), slow_loops.small_network()
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.01), torch.nn.CrossEntropyLoss()
    with watch(loader, model, optimizer, loss_fn=loss_fn) as watched:
        for _ in range(5):
            for images, labels in loader:
                loss_fn(model(images), labels).backward()
                optimizer.step()
            read_numbers(50)
    assert "number.item()" not in {site.text for site in watched.measurement.waits}
    assert [(site.stage, site.times) for site in watched.measurement.waits_between if site.text == "number.item()"] == [
        ("between", 50)
    ]


def test_workers_of_a_validation_are_no_workers_of_the_training(monkeypatch):
    monkeypatch.setattr(worker_registry, "_groups", weakref.WeakKeyDictionary())  # other tests keep feeds open
    observation = EngineObservation(images_per_step=8, num_steps=None)
    plan = Plan(num_samples=64, batch_size=8)
    with observation.observing(), Feed(Numbers(), plan, FeedConfig(workers=1)) as feed, contextlib.ExitStack() as stack:
        next(iter(feed))
        with clock.stage("train.validate"):
            other = stack.enter_context(Feed(Numbers(), plan, FeedConfig(workers=1)))
            next(iter(other))
        assert sorted(crew.in_pause for crew in worker_registry.worker_groups()) == [False, True]
        train(3, steps_per_epoch=8, feed=feed)
        measurement = observation.finish() or observation.measurement
    assert measurement.num_workers == 1


def test_samples_after_the_last_step_count_for_nothing():
    observation = EngineObservation(images_per_step=8, num_steps=None)
    with observation.observing():
        train(4)
        with clock.stage("train.save"):
            time.sleep(0.2)
    assert observation.profile.ledger.ms("host", "checkpoint") == 0
    assert all("0.2" not in line.text for line in observation.profile.measurement.lines)


class Traces:
    """Fake of torch's tracing that records what was traced."""

    def __init__(self, monkeypatch):
        self.running, self.stopped = 0, []
        monkeypatch.setattr(observation, "DeviceTrace", self.start)

    def start(self):
        self.running += 1
        return self

    def stop(self, num_steps):
        assert self.running == 1
        self.running = 0
        self.stopped.append(num_steps)
        return DeviceWork(busy_ms=float(num_steps), copy_ms=0.0, launches=1.0)


class FakeClock:
    num_steps = 0

    def opened(self, name): ...
    def closed(self, name): ...
    def step_ended(self): ...


def traced(monkeypatch, *, pause_after, in_step):
    """Steps of an observation with a fake GPU, with a pause after one of them."""
    traces, observed = Traces(monkeypatch), Observation(WorkerObserver())
    observed._device = observed.recorder.device = FakeClock()
    with observed.recorder.recording():
        for step in range(1, ALL_PHASES.tracing_ends + 1):
            if step == pause_after and in_step:
                with clock.stage("train.between"), clock.stage("train.validate"):
                    assert traces.running == 0
            clock.step_ended(8)
            observed.after_step()
            if step == pause_after and not in_step:
                observed.pass_ends()
                assert traces.running == 0
                observed.pass_begins()
        if observed._timed is not None:
            observed._timed.close()
    return traces.stopped, observed._work


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("after", range(1, ALL_PHASES.traced + 1))
def test_a_trace_ends_where_a_pause_begins(monkeypatch, after, in_step):
    stopped, work = traced(monkeypatch, pause_after=ALL_PHASES.counting_ends + after, in_step=in_step)
    assert stopped == [after] and work.busy_ms == after


def test_a_trace_that_a_pause_ends_before_its_first_step_is_started_again(monkeypatch):
    stopped, work = traced(monkeypatch, pause_after=ALL_PHASES.counting_ends, in_step=False)
    assert stopped == [1, ALL_PHASES.traced] and work.busy_ms == ALL_PHASES.traced


def test_the_timeline_shows_steps_and_no_pause():
    ms = 1_000_000
    steps = [Event("forward", at * 10 * ms, (at * 10 + 9) * ms, 0) for at in range(10)]
    pause = Event("train.validate", 80 * ms, 99 * ms, 0)
    svg = timeline_svg({"host": [*steps[:8], pause, Event("forward", 100 * ms, 109 * ms, 0)]}, 30 * ms)
    assert svg.count("<title>forward") == 3 and "validation" not in svg


def test_the_same_waits_inside_of_steps_are_blamed():
    """The wrong verdict once given on the demo on an H200 is right for a training that waits like this in its steps."""
    apart = SITUATIONS["H200: the demo, epochs of 8 steps"].measurement
    sites = [WaitSite(where=site.where, per_step=site.times / 2, text=site.text) for site in apart.waits_between]
    causes = [diagnose(replace(apart, waits=sites)).cause, diagnose(apart).cause]
    assert causes == ["validation", "validation"]
    idle = replace(apart, waits=sites, device_busy_ms=4.0)
    assert diagnose(idle).cause == "host-device waits"
    assert diagnose(replace(apart, device_busy_ms=4.0)).cause != "host-device waits"


def test_waits_between_steps_are_kept_and_shown(tmp_path):
    measurement = SITUATIONS["H200: the demo, epochs of 8 steps"].measurement
    html = save_report(tmp_path, measurement, diagnose(measurement)).read_text()
    assert load_measurement(tmp_path / "profile.json").waits_between == list(measurement.waits_between)
    assert "Between steps" in html and "nms/suppress.py:112" in html


def test_a_profile_of_an_earlier_version_is_read(tmp_path):
    measurement = SITUATIONS["validation after every few steps"].measurement
    path = save_report(tmp_path, measurement, diagnose(measurement)).with_name("profile.json")
    path.write_text(path.read_text().replace('"waits_between"', '"unknown"'))
    assert diagnose(load_measurement(path)) == diagnose(measurement)


def test_a_counter_without_steps_does_not_divide_by_zero():
    assert (WaitCounter().sites(), WaitCounter().between()) == ([], [])
    assert WaitBetween(where="x.py:1", stage="validate", times=3).text == ""
