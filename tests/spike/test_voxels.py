"""Bins, counts and the other representations match stored values."""

import json
from pathlib import Path

import numpy as np
import pytest

from flatout.errors import ConfigError, DataError
from flatout.spike.data.voxels import (
    bin_edges,
    centre_window,
    count_dtype,
    frames_per_bin,
    texture_from_playback,
    tfp_centres,
    trimmed,
    voxel_counts,
)
from tests.golden_cases import golden_cases
from tests.spike.recipe import simulate


def streams_beside(path: Path):
    return json.loads((path.parent / "streams.json").read_text())["cases"]


def voxels(path: Path):
    """Every `case/B5/kind` array with the parameters of its stream."""
    if not (path.parent / "streams.json").exists():
        return
    arrays, parameters = np.load(path), streams_beside(path)
    for key in arrays:
        yield key, (parameters[key.split("/")[0]], int(key.split("/")[1][1:]), key.split("/")[2], arrays[key])


def representations(path: Path):
    """The entries of the JSON file and the arrays beside it, each with the stream that it was made from."""
    facts = json.loads(path.read_text())
    streams = streams_beside(path) if (path.parent / "streams.json").exists() else {}
    stream = streams.get(facts.get("source_case"))
    arrays = np.load(path.with_suffix(".npz")) if path.with_suffix(".npz").exists() else {}
    for key, value in facts.items():
        if key not in ("source_case", "centers25"):  # no representation of flatout has evenly spread centres
            yield key, (key, value, stream)
    for key in arrays:
        yield key, (key, arrays[key], stream)


@pytest.mark.parametrize("case", golden_cases("spike/bins.json"))
def test_bins_match_the_golden_table(case):
    edges = bin_edges(case["T"], case["B"])
    assert (np.searchsorted(edges, np.arange(case["T"]), side="right") - 1).tolist() == case["bin_of_t"]
    assert frames_per_bin(case["T"], case["B"]).tolist() == case["frames_per_bin"]


@pytest.mark.parametrize("case", golden_cases("spike/voxels.npz", voxels, also=("spike/streams.json",)))
def test_voxels_match_the_golden_arrays(case):
    import torch

    from flatout.spike.step import Normalise

    parameters, num_bins, kind, expected = case
    spikes, _ = simulate(parameters)
    counts = voxel_counts(spikes, num_bins)
    norm = Normalise({"count": "none"}.get(kind, kind))
    num_frames = torch.tensor(frames_per_bin(len(spikes), num_bins), dtype=torch.float32)
    found = norm(torch.from_numpy(counts)[None, None], num_frames[None, None])[0, 0].numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if kind == "count" else 1e-6)


@pytest.mark.parametrize(
    "case",
    golden_cases("spike/representations.json", representations, also=("spike/representations.npz",)),
)
def test_other_representations_match_the_golden_arrays(case):
    key, expected, stream = case
    if stream is None:
        pytest.skip("the stream that this was made from is not in the golden folder")
    spikes, _ = simulate(stream)
    words = key.split("_")
    if words[0] == "tfp":
        channels, half = int(words[1][1:]), int(words[2][2:])
        if words[-1] == "centers":
            assert tfp_centres(len(spikes), channels, half) == expected
        else:
            assert np.array_equal(texture_from_playback(spikes, channels, half), expected)
    else:
        length = int(words[-1]) if words[:2] == ["raw", "window"] else int(key.removeprefix("mid"))
        assert np.array_equal(spikes[centre_window(len(spikes), length)], expected)


def test_counts_add_up_to_the_spikes_whatever_the_bins():
    spikes = np.random.default_rng(1).integers(0, 2, (49, 5, 7), np.uint8)
    for bins in (1, 2, 5, 32, 49, 60):
        assert np.array_equal(voxel_counts(spikes, bins).sum(axis=0), spikes.sum(axis=0))


def test_long_bins_and_byte_values_get_a_type_that_holds_them():
    assert count_dtype(104, 5) == np.uint8
    assert count_dtype(5 * 256, 5) == np.float32
    assert count_dtype(10, 5, largest_value=255) == np.float32


def test_windows_and_trims_that_leave_nothing_are_refused():
    with pytest.raises(DataError, match="window of 57"):
        centre_window(56, 57)
    with pytest.raises(DataError, match="more than 40"):
        tfp_centres(40, 4, 20)
    with pytest.raises(ConfigError, match="SPIKE_TRIM"):
        trimmed(40, (20, 20))
    assert trimmed(137, (20, 20)) == slice(20, 117)
