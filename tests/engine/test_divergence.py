"""When a training counts as lost: decided from flags alone."""

import numpy as np
import pytest

from flatout.engine.meter import MAX_ROLLBACKS, PATIENCE, PATIENCE_WITH_SCALE, Guard


def judged(guard: Guard, flags: list[int], *, gradients: bool = False, scaled: bool = False) -> bool:
    """Remember as many steps and hand in their flags, all at once."""
    for step in range(len(flags)):
        guard.remember(0, step, np.arange(8) + 8 * step)
    bad, good = np.array(flags, bool), np.zeros(len(flags), bool)
    return guard.is_lost(good if gradients else bad, bad if gradients else good, scaled=scaled)


@pytest.mark.parametrize(
    ("flags", "lost"),
    [([0] * 9, False), ([1, 1, 0, 1, 1], False), ([0, 1, 1, 1, 0, 0], True), ([1] * 9, True), ([], False)],
)
def test_three_bad_losses_in_a_row_are_too_many(flags: list[int], lost: bool):
    assert PATIENCE == 3
    assert judged(Guard(), flags) == lost


def test_a_run_goes_on_across_intervals():
    guard = Guard()
    assert not judged(guard, [0, 1])
    assert not judged(guard, [1])
    assert judged(guard, [1, 0])


def test_overflows_are_forgiven_while_a_scale_is_searched_for():
    assert not judged(Guard(), [1] * (PATIENCE_WITH_SCALE - 1), gradients=True, scaled=True)
    assert judged(Guard(), [1] * PATIENCE_WITH_SCALE, gradients=True, scaled=True)
    assert judged(Guard(), [1] * PATIENCE, gradients=True)
    assert judged(Guard(), [1] * PATIENCE, scaled=True), "a loss is not finite for another reason"


def test_steps_inside_an_accumulation_window_do_not_end_a_run_of_bad_gradients():
    guard = Guard()
    bad_gradient_N = np.arange(4 * PATIENCE) % 4 == 3
    for step, ends_window in enumerate(bad_gradient_N):
        guard.remember(0, step, np.arange(8), ends_window=bool(ends_window))
    assert guard.is_lost(np.zeros_like(bad_gradient_N), bad_gradient_N, scaled=False)


def test_going_back_forgets_the_run_and_is_allowed_a_few_times():
    guard = Guard()
    for _ in range(MAX_ROLLBACKS):
        assert judged(guard, [1, 1, 1])
        assert guard.roll_back()
        assert not judged(guard, [1, 1])
    assert judged(guard, [1])
    assert not guard.roll_back()


def test_the_samples_of_the_last_bad_steps_are_named():
    guard = Guard()
    judged(guard, [1, 0, 1, 1, 1])
    assert guard.complaint() == (
        "Loss, gradients or weights are not finite ("
        "epoch 0 step 2: samples 16, 17, 18, 19, 20, 21, 22, 23; "
        "epoch 0 step 3: samples 24, 25, 26, 27, 28, 29, 30, 31; "
        "epoch 0 step 4: samples 32, 33, 34, 35, 36, 37, 38, 39)."
    )
    assert guard.bad_samples()[0] == {"epoch": 0, "step": 2, "samples": list(range(16, 24))}


def test_samples_are_those_of_the_step_though_the_batch_was_only_borrowed():
    guard = Guard()
    slot = np.arange(3)
    guard.remember(0, 0, slot)
    slot += 100
    guard.is_lost(np.array([True]), np.array([False]), scaled=False)
    assert guard.bad_samples()[0]["samples"] == [0, 1, 2]


def test_weights_that_broke_without_a_bad_step_have_nobody_to_blame():
    assert Guard().complaint() == "Loss, gradients or weights are not finite (no single step to blame)."
