"""Which sample goes into which step: order, ranks, last steps, weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.errors import ConfigError, DataError
from flatout.feed.plan import (
    Plan,
    choose_micro_batch,
    choose_slots,
    micro_batches,
    shuffled_order,
    weighted_order,
)
from tests.reference.plain_philox import plain_philox


def steps_of(plan: Plan, epoch: int = 0):
    epoch_plan = plan.epoch(epoch)
    return [epoch_plan.step(step) for step in range(epoch_plan.num_steps)]


@given(num_samples=st.integers(1, 500), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000))
def test_an_epoch_shows_every_sample_exactly_once(num_samples, seed, epoch):
    order = shuffled_order(num_samples, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num_samples))


def test_orders_differ_between_epochs_and_seeds_but_repeat_for_the_same():
    orders = [shuffled_order(100, seed=seed, epoch=epoch).tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0), (0, 0)]]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_the_order_of_a_seed_never_changes():
    """A resumed run must get the same order as from an older version of flatout or NumPy: samples sorted by the first
    64 bits of Philox at counter (block 0, position, epoch, purpose 1 << 16)."""
    seed, epoch = 7 + (9 << 32), 3
    words = [plain_philox([0, position, epoch, 1 << 16], [7, 9]) for position in range(50)]
    expected = sorted(range(50), key=lambda position: (words[position][0] << 32) + words[position][1])
    assert shuffled_order(50, seed=seed, epoch=epoch).tolist() == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("last", ["drop", "pad", "short"])
def test_a_step_trains_on_the_same_samples_for_any_rank_count(num_ranks, last):
    alone = steps_of(Plan(num_samples=250, batch_size=24, seed=7, last=last), epoch=3)
    ranks = [
        steps_of(
            Plan(num_samples=250, batch_size=24 // num_ranks, seed=7, last=last, rank=rank, num_ranks=num_ranks),
            epoch=3,
        )
        for rank in range(num_ranks)
    ]
    assert {len(steps) for steps in ranks} == {len(alone)}
    for number, step in enumerate(alone):
        dealt = np.concatenate([ranks[rank][number].positions for rank in range(num_ranks)])
        assert sorted(dealt.tolist()) == step.positions.tolist()
        assert sum(ranks[rank][number].num_valid for rank in range(num_ranks)) == step.num_valid


@given(
    num_samples=st.integers(1, 200),
    batch_size=st.integers(1, 40),
    num_ranks=st.integers(1, 5),
    last=st.sampled_from(["pad", "short"]),
)
def test_no_sample_is_lost_or_counted_twice_when_the_last_step_is_kept(num_samples, batch_size, num_ranks, last):
    valid = []
    for rank in range(num_ranks):
        plan = Plan(num_samples=num_samples, batch_size=batch_size, last=last, rank=rank, num_ranks=num_ranks)
        for step in steps_of(plan):
            assert len(step.indices) == batch_size or (last == "short" and len(step.indices) < batch_size)
            valid += step.indices[: step.num_valid].tolist()
    assert sorted(valid) == list(range(num_samples))


def test_padding_repeats_samples_at_new_positions():
    steps = steps_of(Plan(num_samples=10, batch_size=8, last="pad"))
    assert steps[1].num_valid == 2
    assert steps[1].positions.tolist() == list(range(8, 16))
    assert steps[1].indices[2:].tolist() == steps[0].indices[:6].tolist()


def test_a_short_last_step_is_shared_evenly():
    lengths = [
        len(steps_of(Plan(num_samples=21, batch_size=8, last="short", rank=rank, num_ranks=2))[1].indices)
        for rank in range(2)
    ]
    assert sorted(lengths) == [2, 3]


def test_weights_decide_how_often_a_sample_appears():
    weights = np.array([0, 1, 2, 5] * 500, float)
    order = weighted_order(weights, seed=1, epoch=2)
    shares = np.bincount(order % 4, minlength=4) / len(order)
    np.testing.assert_allclose(shares, [0, 1 / 8, 2 / 8, 5 / 8], atol=0.04)


def test_a_given_order_is_followed_also_as_a_function_of_the_epoch():
    fixed = Plan(num_samples=5, batch_size=2, order=np.array([4, 4, 0, 1]))
    assert [step.indices.tolist() for step in steps_of(fixed)] == [[4, 4], [0, 1]]
    by_epoch = Plan(num_samples=5, batch_size=2, order=lambda epoch: np.array([epoch, 0]))
    assert steps_of(by_epoch, epoch=3)[0].indices.tolist() == [3, 0]


def test_shapes_follow_the_step():
    plan = Plan(num_samples=8, batch_size=4, shapes=lambda epoch, step: {"image": (1, 4 + step, 4 + epoch)})
    assert [step.shapes["image"] for step in steps_of(plan, epoch=2)] == [(1, 4, 6), (1, 5, 6)]


@given(num_rows=st.integers(0, 300), size=st.integers(1, 70))
def test_micro_batches_cover_the_rows_once(num_rows, size):
    rows = [row for begin, end in micro_batches(num_rows, size) for row in range(begin, end)]
    assert rows == list(range(num_rows))


@given(batch_size=st.integers(1, 512), num_workers=st.integers(0, 128))
def test_every_worker_finds_work(batch_size, num_workers):
    size, slots = choose_micro_batch(batch_size, num_workers), choose_slots(batch_size, num_workers)
    assert 1 <= size <= 64
    tasks = slots * len(micro_batches(batch_size, size))
    assert tasks >= 2 * num_workers


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_samples": 0, "batch_size": 1}, DataError, "empty"),
        ({"num_samples": 9, "batch_size": 0}, ConfigError, "batch_size=0"),
        ({"num_samples": 9, "batch_size": 2, "rank": 2, "num_ranks": 2}, ConfigError, "rank=2"),
        ({"num_samples": 9, "batch_size": 2, "seed": -1}, ConfigError, "seed=-1"),
        ({"num_samples": 9, "batch_size": 2, "last": "keep"}, ConfigError, "'short'"),
        ({"num_samples": 3, "batch_size": 2, "weights": np.ones(2)}, ConfigError, "3 samples"),
        ({"num_samples": 3, "batch_size": 2, "weights": np.zeros(3)}, ConfigError, "not all zero"),
        ({"num_samples": 3, "batch_size": 2, "weights": np.array([1, np.nan, 1])}, ConfigError, "finite"),
        ({"num_samples": 3, "batch_size": 2, "weights": np.ones(3), "order": np.arange(3)}, ConfigError, "combined"),
    ],
)
def test_an_invalid_plan_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        Plan(**arguments)


@pytest.mark.parametrize(("order", "words"), [([0, 3], "sample 3"), ([-1, 0], "sample -1"), ([], "at least one")])
def test_an_order_outside_the_source_is_refused(order, words):
    with pytest.raises(ConfigError, match=words):
        Plan(num_samples=3, batch_size=1, order=np.array(order, np.int64)).epoch(0)


def test_an_epoch_without_a_complete_step_raises_an_error_with_advice():
    with pytest.raises(ConfigError, match=r"10 samples has no complete step of 32.*last='short'"):
        Plan(num_samples=10, batch_size=16, num_ranks=2).epoch(0)
