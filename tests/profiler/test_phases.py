"""Kinds of looking take phases, and no timed step lives on what was made while the loop stood still."""

import pytest

from flatout.feed.plan import choose_slots
from flatout.profiler.observe.observation import ALL, KERNELS, SPEED


@pytest.mark.parametrize("phases", [ALL, KERNELS, SPEED])
def test_without_a_device_nothing_is_traced_and_nothing_settles(phases):
    assert phases.timing_begins(on_device=False) == phases.counting_ends == phases.warm_up + phases.counted
    assert phases.timing_begins(on_device=True) == phases.counting_ends + phases.traced + phases.settled


@pytest.mark.parametrize("phases", [ALL, SPEED])
def test_batches_that_a_feed_holds_ready_are_used_up_before_a_step_is_timed(phases):
    on_its_way = 1
    assert phases.settled >= choose_slots(batch_size=32, num_workers=8) + on_its_way


def test_waits_are_counted_in_steps_of_their_own():
    assert [step for step in range(1, 12) if ALL.is_counted(step)] == [3, 4]
    assert not any(SPEED.is_counted(step) for step in range(1, 12))
