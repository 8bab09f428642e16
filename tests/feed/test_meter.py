"""The meter measures how long the consumer really waited."""

import time

import pytest

from flatout.clock.clock import StageTime
from flatout.feed import Feed, FeedConfig, Field, Plan, SampleSource
from flatout.feed.runtime import Meter


class Slow(SampleSource):
    fields = {"value": Field((4,))}

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def sample(self, index, rng):
        time.sleep(self.seconds)
        return {"value": [index] * 4}


def read_one_epoch(source: SampleSource, *, consumer_s: float):
    with Feed(source, Plan(num_samples=64, batch_size=8), FeedConfig(workers=1, epochs=1)) as feed:
        for _ in feed:
            time.sleep(consumer_s)
        return feed.meter.read()


def test_data_time_is_the_wait_of_a_consumer_that_is_too_fast():
    reading = read_one_epoch(Slow(0.002), consumer_s=0)
    reading_s = reading.stages["read"].total_ns / 1e9
    assert reading_s >= 64 * 0.002
    assert 0.7 * reading_s < reading.wait_s <= reading.elapsed_s  # one worker: the wait is its reading
    assert reading.data_time_ms == pytest.approx(reading.wait_s * 1e3 / 8)
    assert reading.readiness < 0.4
    assert reading.samples == 64
    assert reading.nbytes == 64 * 4


def test_data_time_is_small_for_a_slow_consumer():
    reading = read_one_epoch(Slow(0), consumer_s=0.02)
    assert reading.data_time_ms < 8
    assert reading.readiness > 0.6
    assert reading.ready_slots > 1


def test_a_reading_covers_the_time_since_the_last_one():
    stages = {"read": StageTime(3, 5_000)}
    meter = Meter(lambda: dict(stages), num_slots=4, num_workers=2)
    meter.count(samples=8, nbytes=100, wait_s=0.5, ready_slots=2)
    stages["read"] = StageTime(4, 9_000)
    first = meter.read()
    assert (first.batches, first.samples, first.wait_s, first.ready_slots) == (1, 8, 0.5, 2)
    assert first.stages["read"] == StageTime(1, 4_000)
    assert meter.read().batches == 0


def test_the_summary_line_has_every_number_with_its_unit():
    line = read_one_epoch(Slow(0.001), consumer_s=0).line()
    for part in ("samples/s", "GB/s", "1 workers", "read", "of 4 slots ready", "data_time", "% faster with a perfect"):
        assert part in line
