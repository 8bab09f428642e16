"""A stream continues exactly where it was saved (G2, G3), or raises an error that says why it cannot."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.errors import ConfigError
from flatout.feed import Feed, FeedConfig, Plan
from tests.feed.comparing import Mixed, digest, digests

NUM_STEPS = 5


def new_feed(workers: int = 0, **changes: Any) -> Feed:
    plan = Plan(**{"num_samples": 42, "batch_size": 8, "seed": 5} | changes)
    return Feed(Mixed(plan.num_samples), plan, FeedConfig(workers=workers))


def unbroken(num_epochs: int, **changes: Any) -> list[str]:
    with new_feed(**changes) as feed:
        return [each for _ in range(num_epochs) for each in digests(feed)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", range(2 * NUM_STEPS))
def test_resumed_at_any_step_equals_unbroken(stop, workers):
    expected = unbroken(2)
    with new_feed() as feed:
        seen = []
        while len(seen) < stop:
            for batch in feed:
                seen.append(digest(batch))
                if len(seen) == stop:
                    break
        state = json.loads(json.dumps(feed.state_dict()))  # plain containers only
    with new_feed(workers) as feed:
        feed.load_state_dict(state)
        while len(seen) < 2 * NUM_STEPS:
            seen += digests(feed)
    assert seen == expected


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=5, max_size=8))
def test_many_interruptions_equal_none(runs):
    expected = unbroken(5)
    seen: list[str] = []
    state = None
    for num_steps, backend in runs:
        config = [{"workers": 0}, {"workers": 2, "backend": "thread"}, {"workers": 0, "micro_batch": 3}][backend]
        plan = Plan(num_samples=42, batch_size=8, seed=5)
        with Feed(Mixed(42), plan, FeedConfig(**config)) as feed:
            if state is not None:
                feed.load_state_dict(state)
            target = min(len(seen) + num_steps, len(expected))
            while len(seen) < target:
                for batch in feed:
                    seen.append(digest(batch))
                    if len(seen) == target:
                        break
            state = feed.state_dict()
    assert seen == expected[: len(seen)]
    assert len(seen) >= 5


def test_a_state_that_is_off_by_one_step_is_detected():
    """Negative control: the comparison above would catch a replayed or skipped batch."""
    with new_feed() as feed:
        next(iter(feed))
        state = feed.state_dict() | {"next_step": 0}
    with new_feed() as feed:
        feed.load_state_dict(state)
        assert digests(feed) != unbroken(1)[1:]


def test_a_saved_stream_continues_on_other_ranks():
    whole = unbroken(1)
    with new_feed() as feed:
        batches = iter(feed)
        next(batches)
        next(batches)
        state = feed.state_dict()
    with new_feed(batch_size=4, rank=1, num_ranks=2) as feed:
        feed.load_state_dict(state)
        batch = next(iter(feed))
    with new_feed() as feed:
        assert whole[2] == digest(next(feed.epoch(0, start=2)))
        expected = next(feed.epoch(0, start=2))
        np.testing.assert_array_equal(batch["image"], expected["image"][4:])


def test_weights_are_saved_in_the_state():
    weights = np.linspace(0, 1, 42)
    with new_feed() as feed:
        list(feed)
        feed.set_weights(weights)
        batches = iter(feed)
        next(batches)
        state = feed.state_dict()
        expected = digests(batches)
    with new_feed() as feed:
        feed.load_state_dict(state)
        assert digests(feed) == expected


def test_weights_set_between_epochs_replace_what_was_read_ahead():
    weights = np.zeros(42)
    weights[7] = 1
    with new_feed(workers=1) as feed:
        list(feed)
        feed.set_weights(weights)
        assert {index for batch in feed for index in batch.indices.tolist()} == {7}


def test_weights_within_an_epoch_are_refused():
    with new_feed() as feed:
        next(iter(feed))
        with pytest.raises(ConfigError, match="between epochs"):
            feed.set_weights(np.ones(42))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 6}, "seed was 5, is 6"),
        ({"batch_size": 4}, "samples_per_step was 8, is 4"),
        ({"num_samples": 43}, "num_samples was 42, is 43"),
        ({"order": np.arange(42)}, "order of epoch 0 has changed"),
    ],
)
def test_a_stream_that_would_differ_is_refused_with_the_difference(changes, words):
    with new_feed() as feed:
        next(iter(feed))
        state = feed.state_dict()
    with new_feed(**changes) as feed, pytest.raises(ConfigError, match=words):
        feed.load_state_dict(state)


def test_epochs_may_be_read_in_any_order():
    expected = unbroken(3)
    with new_feed(workers=1) as feed:
        assert digests(feed.epoch(2)) == expected[10:]
        assert digests(feed.epoch(0, start=3)) == expected[3:5]
        assert digests(feed.epoch(1)) == expected[5:10]
        assert digests(feed) == expected[10:]
