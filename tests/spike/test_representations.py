"""Images from spikes follow their definitions, on streams made by hand and on any stream."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import flatout.spike
from flatout.errors import ConfigError, DataError
from flatout.spike.data.representations import window_around

STREAMS = arrays.arrays(
    np.uint8, st.tuples(st.integers(1, 30), st.integers(1, 3), st.integers(1, 3)), elements=st.integers(0, 1)
)


def stream_of(*pixels: str) -> np.ndarray:
    """One row of pixels, each a text of spikes: "..x..x" fires in frames 2 and 5."""
    return np.array([[each == "x" for each in pixel] for pixel in pixels], np.uint8).T[:, None]


def test_tfp_is_the_share_of_the_frames_around_a_moment():
    spikes = stream_of("xxxx....", "..x...x.", "........")
    assert flatout.spike.tfp(spikes, centre=3, window=4)[0].tolist() == [0.75, 0.25, 0.0]  # frames 1 to 4
    assert flatout.spike.tfp(spikes, centre=0, window=4)[0].tolist() == [1.0, 0.0, 0.0]  # only frames 0 and 1 exist
    assert flatout.spike.tfp(spikes, centre=7, window=100)[0].tolist() == [0.5, 0.25, 0.0]


def test_tfi_is_one_over_the_interval_that_contains_a_moment():
    spikes = stream_of("x....x..x", "....xx...", "x.......x", ".........")
    image = flatout.spike.tfi(spikes, centre=4, window=9)
    # A spike at the moment begins the interval; one that is not found is just outside of the window.
    assert image[0].tolist() == pytest.approx([1 / 5, 1 / 1, 1 / 8, 1 / 10])
    # Frames 2 to 5: the first pixel's spike before is at or before frame 1, the third pixel has none at all.
    image = flatout.spike.tfi(spikes, centre=4, window=4)
    assert image[0].tolist() == pytest.approx([1 / 4, 1 / 1, 1 / 5, 1 / 5])


def test_voxels_are_rates_of_the_parts_and_raw_is_the_middle():
    spikes = stream_of("xx.x.", "....x")
    # Frame t of 5 belongs to bin t * 2 // 5: three frames, then two.
    assert np.allclose(flatout.spike.voxel(spikes, 2)[:, 0], [[2 / 3, 0], [1 / 2, 1 / 2]])
    assert flatout.spike.raw(spikes, 3)[:, 0].tolist() == [[1, 0], [0, 0], [1, 0]]
    assert flatout.spike.raw(spikes) is spikes
    # More parts than frames: parts without a frame are 0, not NaN.
    assert np.isfinite(flatout.spike.voxel(spikes, 7)).all()


@settings(max_examples=60, deadline=None)
@given(STREAMS, st.data())
def test_all_agree_about_any_stream(spikes, data):
    """The definitions, pixel by pixel; all values are rates from 0 to 1."""
    num, height, width = spikes.shape
    centre, window = data.draw(st.integers(0, num - 1)), data.draw(st.integers(1, 40))
    kept = window_around(num, centre, window)
    assert kept.start <= centre < kept.stop and kept.stop - kept.start <= window
    tfp, tfi = (method(spikes, centre, window) for method in (flatout.spike.tfp, flatout.spike.tfi))
    assert tfp.dtype == tfi.dtype == np.float32
    for y in range(height):
        for x in range(width):
            fired = np.flatnonzero(spikes[:, y, x])
            fired = fired[(fired >= kept.start) & (fired < kept.stop)]
            before = max((t for t in fired if t <= centre), default=kept.start - 1)
            after = min((t for t in fired if t > centre), default=kept.stop)
            assert tfi[y, x] == pytest.approx(1 / (after - before))
            assert tfp[y, x] == pytest.approx(len(fired) / (kept.stop - kept.start))
    # One bin is TFP over everything; bins weighted by their frames give the number of spikes.
    assert np.allclose(flatout.spike.voxel(spikes, 1)[0], flatout.spike.tfp(spikes, num // 2, 2 * num + 1))
    bins = data.draw(st.integers(1, num))
    frames = np.bincount(np.arange(num) * bins // num, minlength=bins)
    assert np.allclose((flatout.spike.voxel(spikes, bins) * frames[:, None, None]).sum(0), spikes.sum(0), atol=1e-4)


def test_a_constant_rate_is_found_by_all():
    """A pixel that fires in every fourth frame has a quarter, wherever one looks."""
    spikes = np.zeros((64, 2, 2), np.uint8)
    spikes[::4] = 1
    for centre in range(20, 40):
        assert np.all(flatout.spike.tfi(spikes, centre, 32) == 0.25)
        assert np.all(flatout.spike.tfp(spikes, centre, 32) == 0.25)
    assert np.all(flatout.spike.voxel(spikes, 4) == 0.25)


def test_moments_outside_of_a_stream_and_empty_windows_are_refused():
    spikes = np.zeros((8, 2, 2), np.uint8)
    with pytest.raises(ConfigError, match=r"spike frame 8 is outside a stream of 8: use 0 to 7"):
        flatout.spike.tfp(spikes, 8, 3)
    with pytest.raises(ConfigError, match="a window of 0 spike frames"):
        flatout.spike.tfi(spikes, 3, 0)
    with pytest.raises(DataError, match="a window of 9 spike frames does not fit into a stream of 8"):
        flatout.spike.raw(spikes, 9)
    with pytest.raises(ConfigError, match="0 voxel bins: there must be 1 or more"):
        flatout.spike.voxel(spikes, 0)
