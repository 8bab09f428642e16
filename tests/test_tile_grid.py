"""Grids of tiles cover every pixel, overlap as asked, and have no more tiles than that takes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.errors import ConfigError
from flatout.images import TileGrid

sides = st.integers(1, 500)


@settings(deadline=None)  # the machine may be busy
@given(sides, sides, st.integers(1, 120), st.floats(0, 0.9))
def test_tiles_cover_every_pixel_and_lie_inside_the_image(height, width, tile, overlap):
    grid = TileGrid.overlapping((height, width), tile, overlap)
    covered_HW = np.zeros((height, width), bool)
    for left, top, right, bottom in grid.window_T4.tolist():
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert (right - left, bottom - top) == (min(tile, width), min(tile, height))
        covered_HW[top:bottom, left:right] = True
    assert covered_HW.all() and len(grid.window_T4) == grid.per_image


@settings(deadline=None)
@given(st.integers(2, 5000), st.integers(2, 700), st.floats(0, 0.9))
def test_neighbours_share_what_was_asked_for_with_the_fewest_tiles(length, tile, overlap):
    grid = TileGrid.overlapping((length, length), tile, overlap)
    shared = [left + min(tile, length) - right for left, right in pairwise(grid.xs)]
    asked = min(-int(-tile * overlap // 1), tile - 1)
    assert all(each >= asked for each in shared)
    # With one tile less, even spacing could not reach the asked overlap.
    fewer = len(grid.xs) - 1
    assert fewer == 0 or tile + (fewer - 1) * (tile - asked) < length


def test_an_image_that_is_not_larger_than_a_tile_is_one_tile():
    assert TileGrid.overlapping((480, 640), 640, 0.2).window_T4.tolist() == [[0, 0, 640, 480]]
    assert TileGrid.overlapping((480, 641), 640, 0.2).window_T4.tolist() == [[0, 0, 640, 480], [1, 0, 641, 480]]


def test_a_tile_without_pixels_or_an_overlap_of_everything_is_refused():
    for tile, overlap in ((0, 0.2), (64, 1.0), (64, -0.1)):
        with pytest.raises(ConfigError, match="use 1 px or more, and 0 to below 1"):
            TileGrid.overlapping((100, 100), tile, overlap)
