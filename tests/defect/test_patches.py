"""Grids cover every pixel, indices mean the same patch everywhere, and stitching gives each pixel one owner."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.defect.patches import MIN_OVERLAP, Grid
from flatout.errors import ConfigError
from flatout.images import tile_cuts, tile_starts, tiles_for_overlap
from tests.defect.golden_files import records
from tests.golden_cases import golden_cases
from tests.reference.plain_stitch import stitch_average, stitch_owner


@pytest.mark.parametrize("case", golden_cases("defect/grid.json", records("positions")))
def test_positions_and_cuts_match_the_table(case):
    record, _ = case
    found = tile_starts(record["img"], record["patch"], record["min_patches"])
    assert found == record["positions"]
    if found is not None and record.get("cuts") is not None:
        assert tile_cuts(found, record["img"], record["patch"]) == record["cuts"]


@pytest.mark.parametrize("case", golden_cases("defect/grid.json", records("index")))
def test_indices_match_the_table(case):
    record, _ = case
    grid = Grid((record["H"], record["W"]), (record["patch_h"], record["patch_w"]), (record["min_y"], record["min_x"]))
    assert grid.per_image == record["per_image"]
    assert grid.per_image * record["images"] == record["total"]
    columns = dict(zip(record["columns"], np.array(record["rows"]).T, strict=True))
    image, y, x = grid.locate(columns["index"])
    np.testing.assert_array_equal(image, columns["image"])
    np.testing.assert_array_equal(y, columns["y"])
    np.testing.assert_array_equal(x, columns["x"])
    np.testing.assert_array_equal(np.asarray(grid.ys)[columns["y_idx"]], columns["y"])
    np.testing.assert_array_equal(np.asarray(grid.xs)[columns["x_idx"]], columns["x"])


@pytest.mark.parametrize("case", golden_cases("defect/stitch.json", records("cases"), also=("defect/stitch.npz",)))
def test_stitching_matches_the_golden_maps(case):
    record, arrays = case
    grid = Grid((record["H"], record["W"]), (record["patch"], record["patch"]), (len(record["ys"]), len(record["xs"])))
    assert (grid.ys, grid.xs) == (record["ys"], record["xs"])
    assert (grid.y_cuts, grid.x_cuts) == (record["ycuts"], record["xcuts"])
    tiles = arrays[f"{record['name']}_tiles"]
    np.testing.assert_array_equal(stitch_owner(tiles, grid), arrays[f"{record['name']}_mid"])
    np.testing.assert_allclose(stitch_average(tiles, grid), arrays[f"{record['name']}_avg"], rtol=0, atol=1e-6)


@settings(deadline=None)  # the machine may be busy
@given(st.integers(4, 60), st.integers(0, 400), st.integers(2, 12))
def test_a_grid_covers_every_pixel_and_every_pixel_lies_in_the_patch_that_owns_it(patch, more, min_patches):
    length = patch + more
    found = tile_starts(length, patch, min_patches)
    assert found is not None and found[0] == 0 and found[-1] == length - patch
    assert all(right - left <= patch for left, right in pairwise(found))
    edges = tile_cuts(found, length, patch)
    for start, first, last in zip(found, edges[:-1], edges[1:], strict=True):
        assert start <= first <= last <= start + patch


@settings(deadline=None)  # the machine may be busy
@given(st.integers(17, 200), st.integers(1, 1500))
def test_the_default_number_of_patches_overlaps_as_promised(patch, more):
    length = patch + more
    found = tile_starts(length, patch, tiles_for_overlap(length, patch, MIN_OVERLAP)) or []
    assert min(left + patch - right for left, right in pairwise(found)) >= MIN_OVERLAP


def test_strips_get_nine_rows_and_two_columns():
    grid = Grid.over((976, 176), 128)
    assert (len(grid.ys), len(grid.xs)) == (9, 2)
    assert len(Grid.over((1024, 1024), 256).ys) == 5


def test_images_smaller_than_the_patch_are_refused():
    with pytest.raises(ConfigError, match=r"200 x 100 px .* are smaller than the patch of 128"):
        Grid.over((100, 200), 128)


def test_stitching_the_patches_of_an_image_restores_it():
    image = np.random.default_rng(0).random((61, 45), np.float32)
    grid = Grid.over(image.shape, 24)
    tiles = np.stack([image[y : y + 24, x : x + 24] for y in grid.ys for x in grid.xs])
    np.testing.assert_array_equal(stitch_owner(tiles, grid), image)
    np.testing.assert_allclose(stitch_average(tiles, grid), image, rtol=1e-6)
