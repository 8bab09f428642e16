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
    assert "flipud fits better" in compare_with_frame(blur[::-1] / 2, blur).problem
    assert "do not belong together" in compare_with_frame(np.random.default_rng(2).random((20, 30)), blur).problem
    same = np.tile(np.arange(30.0), (20, 1))
    assert "SPIKE_FLIPUD" in compare_with_frame(same, same).problem
