"""When a training counts as diverged: decided from flags alone."""

import numpy as np
import pytest

from flatout.engine.meter import MAX_BAD_STEPS, MAX_BAD_STEPS_FP16, MAX_ROLLBACKS, DivergenceGuard


def diverges(guard: DivergenceGuard, flags: list[int], *, gradients: bool = False, scaled: bool = False) -> bool:
    """Add as many steps, then pass their flags all at once."""
    for step in range(len(flags)):
        guard.add_step(0, step, np.arange(8) + 8 * step)
    bad, good = np.array(flags, bool), np.zeros(len(flags), bool)
    return guard.has_diverged(good if gradients else bad, bad if gradients else good, scaled=scaled)


@pytest.mark.parametrize(
    ("flags", "diverged"),
    [([0] * 9, False), ([1, 1, 0, 1, 1], False), ([0, 1, 1, 1, 0, 0], True), ([1] * 9, True), ([], False)],
)
def test_three_bad_losses_in_a_row_are_too_many(flags: list[int], diverged: bool):
    assert MAX_BAD_STEPS == 3
    assert diverges(DivergenceGuard(), flags) == diverged


def test_bad_steps_are_counted_across_intervals():
    guard = DivergenceGuard()
    assert not diverges(guard, [0, 1])
    assert not diverges(guard, [1])
    assert diverges(guard, [1, 0])


def test_overflows_are_tolerated_while_the_loss_scale_is_adjusted():
    assert not diverges(DivergenceGuard(), [1] * (MAX_BAD_STEPS_FP16 - 1), gradients=True, scaled=True)
    assert diverges(DivergenceGuard(), [1] * MAX_BAD_STEPS_FP16, gradients=True, scaled=True)
    assert diverges(DivergenceGuard(), [1] * MAX_BAD_STEPS, gradients=True)
    assert diverges(DivergenceGuard(), [1] * MAX_BAD_STEPS, scaled=True), "a loss is not finite for another reason"


def test_steps_inside_an_accumulation_window_do_not_reset_the_count_of_bad_gradients():
    guard = DivergenceGuard()
    bad_gradient_N = np.arange(4 * MAX_BAD_STEPS) % 4 == 3
    for step, ends_window in enumerate(bad_gradient_N):
        guard.add_step(0, step, np.arange(8), ends_window=bool(ends_window))
    assert guard.has_diverged(np.zeros_like(bad_gradient_N), bad_gradient_N, scaled=False)


def test_going_back_resets_the_count_and_is_allowed_a_few_times():
    guard = DivergenceGuard()
    for _ in range(MAX_ROLLBACKS):
        assert diverges(guard, [1, 1, 1])
        assert guard.roll_back()
        assert not diverges(guard, [1, 1])
    assert diverges(guard, [1])
    assert not guard.roll_back()


def test_the_samples_of_the_last_bad_steps_are_named():
    guard = DivergenceGuard(lambda index: f"{index}.jpg")
    diverges(guard, [1, 0, 1, 1, 1])
    assert guard.description() == (
        "Loss, gradients or weights are not finite ("
        "epoch 0 step 2: samples 16.jpg, 17.jpg, 18.jpg, ...; "
        "epoch 0 step 3: samples 24.jpg, 25.jpg, 26.jpg, ...; "
        "epoch 0 step 4: samples 32.jpg, 33.jpg, 34.jpg, ...)."
    )
    samples = list(range(16, 24))
    names = [f"{index}.jpg" for index in samples]
    assert guard.bad_samples()[0] == {"epoch": 0, "step": 2, "samples": samples, "names": names}


def test_samples_are_those_of_the_step_even_after_the_slot_was_refilled():
    guard = DivergenceGuard()
    slot = np.arange(3)
    guard.add_step(0, 0, slot)
    slot += 100
    guard.has_diverged(np.array([True]), np.array([False]), scaled=False)
    assert guard.bad_samples()[0]["samples"] == [0, 1, 2]


def test_weights_that_broke_without_a_bad_step_name_no_step():
    assert DivergenceGuard().description() == "Loss, gradients or weights are not finite (no single bad step)."


def test_the_first_bad_step_is_where_the_streak_began_that_counts_as_diverged():
    guard = DivergenceGuard()
    assert not diverges(guard, [1, 0, 1])
    assert guard.first_bad is None
    for step in range(3, 8):
        guard.add_step(0, step, np.arange(8))
    assert guard.has_diverged(np.ones(5, bool), np.zeros(5, bool), scaled=False)
    assert guard.first_bad is not None
    assert (guard.first_bad.epoch, guard.first_bad.step) == (0, 2)
    assert [bad["step"] for bad in guard.bad_samples()] == [2, 5, 6, 7]


@pytest.mark.parametrize(("to", "first_step"), [((0, 1), 5), ((0, 3), 2)])
def test_a_streak_goes_on_after_a_return_to_a_checkpoint_that_was_saved_within_it(to: tuple[int, int], first_step: int):
    guard = DivergenceGuard()
    assert diverges(guard, [0, 0, 1, 1, 1])
    assert guard.roll_back(to)
    for step in range(5, 8):
        guard.add_step(0, step, np.arange(8))
    assert guard.has_diverged(np.ones(3, bool), np.zeros(3, bool), scaled=False)
    assert guard.first_bad is not None
    assert guard.first_bad.step == first_step
