"""A loop with the engine's marks and a flatout feed is observed, workers included."""

import time
from pathlib import Path

import numpy as np
import pytest

from flatout import Feed, FeedConfig, Field, Plan, SampleSource
from flatout.clock import clock, worker_registry
from flatout.errors import ConfigError
from flatout.profiler.observe.engine_steps import EngineObservation

pytestmark = pytest.mark.timing


class Numbers(SampleSource):
    """Samples that take a millisecond, most of it in a stage of their own."""

    fields = {"x": Field((8,), np.float32)}

    def __len__(self):
        return 64

    def where(self, index):
        return f"number {index}"

    def sample(self, index, rng):
        with clock.stage("decode"):
            time.sleep(0.001)
        return {"x": np.full(8, index, np.float32)}


def train(feed, num_steps, backward_s=0.003):
    """The engine's marks, in its order."""
    done = 0
    for epoch in range(1000):
        batches = iter(feed.epoch(epoch))
        for _ in range(len(feed)):
            if done == num_steps:
                return
            with clock.stage("train.wait"):
                next(batches)
            with clock.stage("train.forward"):
                time.sleep(0.002)
                with clock.stage("train.loss"):
                    time.sleep(0.001)
            with clock.stage("train.backward"):
                time.sleep(backward_s)
            done += 1


@pytest.mark.parametrize("workers", [0, 1])
def test_the_ledger_holds_the_loop_and_what_makes_the_batches(workers):
    observation = EngineObservation(images_per_step=8, num_steps=6)
    plan = Plan(num_samples=64, batch_size=8)
    with Feed(Numbers(), plan, FeedConfig(workers=workers)) as feed, observation.observing():
        # Steps that a worker keeps up with: one that never idles would have no idle time at the edges of the window.
        train(feed, observation.total_steps, backward_s=0.03 if workers else 0.003)
    ledger, measurement = observation.profile.ledger, observation.profile.measurement
    assert ledger.num_steps == 6 and ledger.images == 8
    assert measurement.num_workers == workers
    place = "workers" if workers else "host"
    assert ledger.ms(place, "decode") >= 8 * 1.0
    assert ledger.ms("host", "backward") >= 3 and ledger.ms("host", "loss") >= 1
    for each in ledger.places:
        assert sum(row.ms for row in ledger.lane(each)) == pytest.approx(ledger.step_ms)
        assert all(row.ms > -0.01 * ledger.step_ms for row in ledger.lane(each))
    assert observation.profile.text()


def test_an_observation_ends_by_itself_and_the_loop_continues():
    observation = EngineObservation(images_per_step=8, num_steps=4)
    with Feed(Numbers(), Plan(num_samples=64, batch_size=8), FeedConfig(workers=0)) as feed, observation.observing():
        train(feed, observation.total_steps + 5)
        with clock.recording() as totals:
            pass
    assert observation.profile.ledger.num_steps == 4
    assert totals.read() == {}


def test_a_whole_training_is_observed_although_its_feed_is_closed_first():
    observation = EngineObservation(images_per_step=8, num_steps=None)
    plan = Plan(num_samples=64, batch_size=8)
    with observation.observing(), Feed(Numbers(), plan, FeedConfig(workers=1)) as feed:
        train(feed, 16)
    ledger = observation.profile.ledger
    assert ledger.num_steps == 16 - 1 - 4  # the end of the last step is not marked; four steps warm up or count waits
    assert observation.profile.measurement.num_workers == 1
    assert ledger.ms("workers", "decode") > 1


def test_a_step_with_a_short_last_batch_is_left_out():
    """Every sixth step has 3 images and takes 50 ms; the others have 8 and take 5."""
    observation = EngineObservation(images_per_step=8, num_steps=6)
    with observation.observing():
        for step in range(1, observation.total_steps + 3):
            with clock.stage("train.wait"):
                observation.batch_taken(8 if step % 6 else 3)
            with clock.stage("train.forward"):
                time.sleep(0.005 if step % 6 else 0.05)
    ledger = observation.profile.ledger
    assert ledger.images == 8 and ledger.num_steps == 6
    assert ledger.step_ms < 20


def test_a_training_that_ends_too_early_is_refused():
    observation = EngineObservation(images_per_step=8, num_steps=4)
    with Feed(Numbers(), Plan(num_samples=64, batch_size=8), FeedConfig(workers=0)) as feed, observation.observing():
        train(feed, 3)
    with pytest.raises(ConfigError, match="Only 2 steps were observed"):
        observation.profile.text()
    assert observation.report(Path()).startswith("No profile: Only 2 steps were observed; a profile needs at least ")


def test_a_feed_is_registered_for_as_long_as_it_is_open():
    before = len(worker_registry.worker_groups())
    with Feed(Numbers(), Plan(num_samples=64, batch_size=8), FeedConfig(workers=1)) as feed:
        next(iter(feed))
        assert len(worker_registry.worker_groups()) == before + 1
        spent = worker_registry.spent(worker_registry.worker_groups()[-1])
        assert spent.runs["decode"] >= 8
        assert spent.self_ns["decode"] >= 8e6
    assert len(worker_registry.worker_groups()) == before
