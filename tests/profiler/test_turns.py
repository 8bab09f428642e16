"""Kinds of looking take turns, and no timed step lives on what was made while the loop stood still."""

import pytest

from flatout.feed.plan import choose_slots
from flatout.profiler.observe.observation import ALL, KERNELS, SPEED


@pytest.mark.parametrize("turns", [ALL, KERNELS, SPEED])
def test_without_a_device_nothing_is_traced_and_nothing_settles(turns):
    assert turns.timing_begins(on_device=False) == turns.counting_ends == turns.warm_up + turns.counted
    assert turns.timing_begins(on_device=True) == turns.counting_ends + turns.traced + turns.settled


@pytest.mark.parametrize("turns", [ALL, SPEED])
def test_batches_that_a_feed_holds_ready_are_used_up_before_a_step_is_timed(turns):
    on_its_way = 1
    assert turns.settled >= choose_slots(batch_size=32, num_workers=8) + on_its_way


def test_waits_are_counted_in_steps_of_their_own():
    assert [step for step in range(1, 12) if ALL.is_counted(step)] == [3, 4]
    assert not any(SPEED.is_counted(step) for step in range(1, 12))
