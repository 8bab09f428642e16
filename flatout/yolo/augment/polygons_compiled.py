"""Boxes of warped polygons by polygons.c where there is a C compiler, else by NumPy: the same bits, much sooner.

Dimension key:  T polygons   P points
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flatout.yolo.augment import polygons
from flatout.yolo.augment.c_library import NotCompiled, load_library

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("polygons.c")

Boxes = Callable[[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]], np.ndarray]
"""Points, number of points and matrix of each polygon, width and height of the output -> boxes [T, 4]; affine only."""


def boxes_of_polygons(
    point_P2: np.ndarray,
    num_points_T: np.ndarray,
    matrix_T33: np.ndarray,
    out_wh: tuple[int, int],
    *,
    perspective: bool,
) -> np.ndarray:
    """As `polygons.boxes_of_polygons`."""
    if perspective or (compiled := compiled_boxes()) is None:
        return polygons.boxes_of_polygons(point_P2, num_points_T, matrix_T33, out_wh, perspective=perspective)
    return compiled(point_P2, num_points_T, matrix_T33, out_wh)


@functools.cache
def compiled_boxes() -> Boxes | None:
    """polygons.c, compiled if need be and compared with NumPy; None, and a word in the log, where it cannot be used."""
    try:
        boxes = boxes_by(load_library(SOURCE))
    except NotCompiled as error:
        logger.warning("Labels with polygons take several times as long: polygons.c is not compiled, %s.", error)
        return None
    if not agrees(boxes):
        logger.warning("Labels with polygons take several times as long: polygons.c gives other numbers than NumPy.")
        return None
    return boxes


def boxes_by(library: ctypes.CDLL) -> Boxes:
    pointer, real = ctypes.c_void_p, ctypes.c_double
    library.polygon_boxes.argtypes = (pointer, pointer, ctypes.c_int64, pointer, real, real, pointer)
    library.polygon_boxes.restype = None

    def boxes(
        point_P2: np.ndarray, num_points_T: np.ndarray, matrix_T33: np.ndarray, out_wh: tuple[int, int]
    ) -> np.ndarray:
        assert num_points_T.sum() == len(point_P2) and len(matrix_T33) == len(num_points_T)
        point_P2 = np.ascontiguousarray(point_P2, np.float32)
        num_points_T = np.ascontiguousarray(num_points_T, np.int64)
        matrix_T33 = np.ascontiguousarray(matrix_T33, np.float64)
        box_T4 = np.empty((len(num_points_T), 4))
        library.polygon_boxes(
            *(point_P2.ctypes.data, num_points_T.ctypes.data, len(num_points_T), matrix_T33.ctypes.data),
            *(*out_wh, box_T4.ctypes.data),
        )
        return box_T4

    return boxes


def agrees(boxes: Boxes) -> bool:
    """Whether the boxes are NumPy's to the bit, for random polygons in, across and beyond the output."""
    rng = np.random.default_rng(0)
    num_points_T = rng.integers(0, 60, 64)
    point_P2 = rng.uniform(0, 100, (int(num_points_T.sum()), 2)).astype(np.float32)
    matrix_T33 = np.tile(np.eye(3), (64, 1, 1))
    matrix_T33[:, :2] += rng.normal(0, 0.5, (64, 2, 3)) * (1, 1, 100)
    expected = polygons.boxes_of_polygons(point_P2, num_points_T, matrix_T33, (100, 80), perspective=False)
    return np.array_equal(boxes(point_P2, num_points_T, matrix_T33, (100, 80)), expected)
