"""The stream does not depend on how it is produced (G1, G9), and equals that of the reference."""

import time
from typing import Any

import numpy as np
import pytest

from flatout.feed import Feed, FeedConfig, Plan
from tests.feed.comparing import Mixed, Vectorised, digests
from tests.reference.plain_feed import plain_batches

CONFIGS = [
    {"workers": 0},
    {"workers": 0, "micro_batch": 3},
    {"workers": 1},
    {"workers": 2, "micro_batch": 1},
    {"workers": 4, "slots": 2},
    {"workers": 3, "prefetch_factor": 9},
    {"workers": 2, "start_method": "fork"},
    {"workers": 2, "persistent_workers": False},
    {"workers": 1, "backend": "thread"},
    {"workers": 4, "backend": "thread", "micro_batch": 5},
]


def plan(**changes: Any) -> Plan:
    usual: dict[str, Any] = {"num_samples": 45, "batch_size": 8, "seed": 11, "last": "pad"}
    return Plan(**usual | changes)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_three_epochs_equal_the_reference(config):
    source = Mixed(45)
    with Feed(source, plan(), FeedConfig(**config)) as feed:
        for epoch in range(3):
            assert digests(feed) == digests(plain_batches(source, plan(), epoch))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("last", ["drop", "pad", "short"])
def test_steps_of_different_shape_equal_the_reference(workers, last):
    shaped = plan(last=last, shapes=lambda epoch, step: {"image": (1, 4 + step, 16 - epoch)})
    source = Vectorised(45)
    with Feed(source, shaped, FeedConfig(workers=workers)) as feed:
        for epoch in range(2):
            assert digests(feed) == digests(plain_batches(source, shaped, epoch))


def test_different_seeds_give_different_streams_at_any_worker_count():
    for workers in (0, 2):
        streams = []
        for seed in (1, 2):
            with Feed(Mixed(45), plan(seed=seed), FeedConfig(workers=workers)) as feed:
                streams.append(digests(feed))
        assert not set(streams[0]) & set(streams[1])


def test_the_comparison_can_fail():
    """Negative control: a source that keeps state between samples depends on the worker count."""

    class Counting(Vectorised):
        visits = 0

        def read(self, indices, draws, out):
            super().read(indices, draws, out)
            time.sleep(0.01)  # so that neither of two workers finishes everything before the other has started
            for row in range(len(indices)):
                out["index"][row] = self.visits
                self.visits += 1

    streams = []
    for workers in (0, 2):
        config = FeedConfig(workers=workers, start_method="fork", micro_batch=2)
        with Feed(Counting(45), plan(), config) as feed:
            streams.append(digests(feed))
    assert streams[0] != streams[1]


def test_a_sample_that_comes_twice_is_drawn_twice():
    repeated = plan(order=np.array([5] * 8), last="drop")
    with Feed(Mixed(45), repeated, FeedConfig(workers=0)) as feed:
        images = next(iter(feed))["image"]
    assert len({image.tobytes() for image in images}) == 8


def test_two_ranks_together_yield_the_batches_of_one():
    source = Mixed(45)
    with Feed(source, plan(), FeedConfig(workers=0)) as alone:
        whole = [batch.copy() for batch in alone]
    halves = []
    for rank in range(2):
        with Feed(source, plan(batch_size=4, rank=rank, num_ranks=2), FeedConfig(workers=1)) as feed:
            halves.append([batch.copy() for batch in feed])
    for number, batch in enumerate(whole):
        for name in ("image", "label", "boxes", "marks"):
            joined = np.concatenate([half[number][name] for half in halves])
            np.testing.assert_array_equal(joined, batch[name])


def test_a_batch_is_a_view_and_its_copy_is_not():
    with Feed(Mixed(45), plan(), FeedConfig(workers=0, slots=2)) as feed:
        batches = iter(feed)
        first = next(batches)
        kept, before = first.copy(), first["image"].copy()
        for _ in range(3):
            next(batches)
        assert not np.array_equal(first["image"], before)
        np.testing.assert_array_equal(kept["image"], before)


def test_the_next_epoch_is_read_ahead_while_the_consumer_is_busy():
    with Feed(Mixed(45), plan(), FeedConfig(workers=1)) as feed:
        list(feed)
        deadline = time.monotonic() + 10
        while not feed._started.stream.is_ready() and time.monotonic() < deadline:
            time.sleep(0.01)
        feed.meter.restart()
        batches = iter(feed)  # what was read ahead must survive this
        next(batches)
        assert feed.meter.read().ready_slots > 0


def test_a_feed_that_knows_its_last_epoch_reads_no_further():
    with Feed(Mixed(45), plan(), FeedConfig(workers=0, epochs=2)) as feed:
        assert [len(digests(feed)) for _ in range(2)] == [6, 6]
        assert feed._started.stream.next_step is None


def test_abandoned_passes_hold_no_slots():
    source = Mixed(45)
    abandoned = []
    with Feed(source, plan(), FeedConfig(workers=1, slots=3)) as feed:
        for step in range(6):
            batches = iter(feed)
            abandoned.append(batches)
            assert next(batches).step == step
        assert digests(feed) == digests(plain_batches(source, plan(), 1))
