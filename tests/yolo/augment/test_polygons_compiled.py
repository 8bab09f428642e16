"""polygons.c gives NumPy's boxes to the bit; where it cannot be compiled, NumPy computes them."""

import functools
import logging
import shutil

import numpy as np
import pytest

from flatout.yolo.augment import c_library, labels
from flatout.yolo.augment.c_library import NotCompiled, load_library
from flatout.yolo.augment.labels import SOURCE, Boxes, bind_polygon_boxes, boxes_of_polygons, matches_numpy

OUT_WH = (100, 80)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Boxes:
    try:
        return bind_polygon_boxes(load_library(SOURCE, tmp_path_factory.mktemp("compiled")))
    except NotCompiled as error:
        pytest.skip(f"polygons.c is not compiled here: {error}")


@pytest.mark.parametrize("most_points", [2, 4, 30, 2500])
@pytest.mark.parametrize("turned", [False, True])
def test_boxes_equal_numpys_to_the_bit(compiled, most_points, turned):
    rng = np.random.default_rng(most_points)
    num_T = rng.integers(0, most_points + 1, 300)
    centre_T2, size_T1 = rng.uniform(-60, 160, (300, 2)), rng.uniform(0, 90, (300, 1))
    point_P2 = np.repeat(centre_T2, num_T, 0) + np.repeat(size_T1, num_T, 0) * rng.uniform(-1, 1, (num_T.sum(), 2))
    # Integers, too: corners that lie exactly on the border of the output.
    point_P2 = np.where(rng.random((len(point_P2), 1)) < 0.3, point_P2.round(), point_P2).astype(np.float32)
    matrix_T33 = np.tile(np.eye(3), (300, 1, 1))
    change = np.array([(1, 1, 50), (1, 1, 50)] if turned else [(1, 0, 20), (0, 1, 20)])
    matrix_T33[::2, :2] += change * rng.normal(0, 0.4, (150, 2, 3))
    expected = labels.boxes_by_numpy(point_P2, num_T, matrix_T33, OUT_WH, perspective=False)
    np.testing.assert_array_equal(compiled(point_P2, num_T, matrix_T33, OUT_WH), expected)
    assert 20 < expected.any(1).sum() < 280, "some must be visible, others not"


def test_no_polygons_have_no_boxes(compiled):
    empty = compiled(np.zeros((0, 2), np.float32), np.zeros(0, np.int64), np.zeros((0, 3, 3)), OUT_WH)
    assert empty.shape == (0, 4)


def test_different_numbers_are_detected(compiled):
    assert matches_numpy(compiled)
    assert not matches_numpy(lambda *given: np.nextafter(compiled(*given), np.inf))


def test_without_a_compiler_numpy_computes_them_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(c_library, "store_folder", lambda: tmp_path / "cache" / "stores")
    monkeypatch.setattr(labels, "compiled_boxes", functools.cache(labels.compiled_boxes.__wrapped__))
    square = np.array([[10, 10], [30, 10], [30, 40], [10, 40]], np.float32)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = boxes_of_polygons(square, np.array([4]), np.eye(3)[None], OUT_WH, perspective=False)
            np.testing.assert_allclose(found, [[10, 10, 30, 40]], atol=0.1)
    assert caplog.text.count("labels with polygons take several times as long") == 1
    assert "no C compiler (cc) found" in caplog.text
