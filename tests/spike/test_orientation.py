"""A stream that is upside down is detected, because it does not match its frame."""

import numpy as np
import pytest

from flatout.spike.data.stream_layout import compare_with_frame
from tests.golden_cases import golden_cases
from tests.spike.recipe import simulate


@pytest.mark.parametrize("case", golden_cases("spike/orientation.json"))
def test_correlations_match_the_golden_ones(case):
    spikes, light_sum = simulate(case["params"])
    found = compare_with_frame(spikes.mean(axis=0), light_sum / case["params"]["T"] / 255)
    assert found.correlation == pytest.approx(case["r"], abs=1e-6)
    assert (found.mean_rate, found.mean_blur, found.gain) == pytest.approx(
        (case["mean_rate"], case["mean_blur"], case["gain"]), abs=1e-6
    )
    assert case["params"]["theta"] / 255 == pytest.approx(case["theta_over_255"])


def test_a_flipped_stream_and_a_foreign_one_are_reported():
    blur = np.random.default_rng(1).random((20, 30))
    assert compare_with_frame(blur / 2, blur).problem == ""
    flipped = compare_with_frame(blur[::-1] / 2, blur).problem
    assert flipped.startswith("spikes are upside down: as they are read now they do not match their frame")
    assert "do not belong together" in compare_with_frame(np.random.default_rng(2).random((20, 30)), blur).problem
    same = np.tile(np.arange(30.0), (20, 1))
    assert "SPIKE_FLIPUD" in compare_with_frame(same, same).problem


@pytest.mark.parametrize(("read_bottom_up", "advice"), [(True, "false"), (False, "true")])
def test_the_advice_for_a_wrong_flip_is_the_other_value_not_the_one_in_use(read_bottom_up, advice):
    blur = np.random.default_rng(1).random((20, 30))
    wrong = compare_with_frame(blur[::-1] / 2, blur, flipud=read_bottom_up)
    assert wrong.problem.endswith(f"flipped vertically they do (1.00). Set DATA.SPIKE_FLIPUD: {advice}.")


def test_a_better_orientation_is_not_called_as_good():
    """Half of the frame is symmetrical, so the stored orientation correlates too, but less."""
    blur = np.random.default_rng(1).random((20, 30))
    symmetrical = np.tile(np.linspace(0, 2, 30), (20, 1))
    found = compare_with_frame((blur + symmetrical)[::-1], blur + symmetrical, flipud=True)
    assert 0.5 < found.correlation["identity"] < 0.9
    assert "spikes are upside down" in found.problem and "as well" not in found.problem


def test_a_mirrored_stream_is_not_blamed_on_the_vertical_flip():
    blur = np.random.default_rng(1).random((20, 30))
    found = compare_with_frame(blur[:, ::-1] / 2, blur, flipud=True)
    assert "mirrored from left to right" in found.problem and "SPIKE_FLIPUD" not in found.problem
