"""Phases of an observation follow one another, and no timed step uses batches made while the loop was stalled."""

import pytest

from flatout.feed.plan import choose_slots
from flatout.profiler.observe.observation import ALL_PHASES, KERNEL_PHASES, SPEED_PHASES, Observation
from flatout.profiler.observe.summary import WorkerObserver


@pytest.mark.parametrize("phases", [ALL_PHASES, KERNEL_PHASES, SPEED_PHASES])
def test_without_a_device_nothing_is_traced_and_nothing_settles(phases):
    assert phases.timing_begins == phases.counting_ends + phases.traced + phases.settled
    on_host = Observation(WorkerObserver(), phases=phases).phases
    assert on_host.timing_begins == phases.counting_ends == phases.warm_up + phases.counted


@pytest.mark.parametrize("phases", [ALL_PHASES, SPEED_PHASES])
def test_batches_that_a_feed_has_ready_are_used_up_before_a_step_is_timed(phases):
    in_flight = 1
    assert phases.settled >= choose_slots(batch_size=32, num_workers=8) + in_flight


def test_waits_are_counted_in_steps_of_their_own():
    assert [step for step in range(1, 12) if ALL_PHASES.is_counted(step)] == [3, 4]
    assert not any(SPEED_PHASES.is_counted(step) for step in range(1, 12))
