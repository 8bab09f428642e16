"""Labels through the warp: new boxes, and which of them are worth keeping.

Dimension key:  Q sheets   T labels   P polygon points

Boxes of polygons that are warped and cut off at the borders of the output.

A polygon is judged by 1000 points along it, equally many on every edge: those inside the output make its box. On an
edge they lie on a line. So where both ends of an edge are inside, all points are, and the first and the last say
enough; where both are beyond the same side, none is. Only edges that cross the border need all their points, a fraction
of the 1000. x and y are arrays of their own: NumPy is faster so.

Dimension key:  T polygons   P points, each the beginning of an edge   X points looked at

Boxes of warped polygons by polygons.c where there is a C compiler, else by NumPy: the same bits, much sooner.

Dimension key:  T polygons   P points
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.yolo.augment.c_library import NotCompiled, load_library
from flatout.yolo.augment.labels import CanvasLabels, offsets, ranges, warped_boxes
from flatout.yolo.augment.layout import Sheets

RESAMPLED = 1000


def boxes_by_numpy(
    point_P2: np.ndarray,
    num_points_T: np.ndarray,
    matrix_T33: np.ndarray,
    out_wh: tuple[int, int],
    *,
    perspective: bool,
) -> np.ndarray:
    """Box around those of a polygon's warped points that are inside the output; zeros if none is; float64 [T, 4]."""
    edges = _Edges(point_P2, num_points_T)
    if perspective:
        # A plane that tilts through the eye turns lines inside out: every point is looked at.
        x_X, y_X, owner_X = edges.points_of(np.flatnonzero(edges.num_samples_P))
        x_X, y_X, away_X = warped_rows(x_X, y_X, matrix_T33[owner_X])
        return box_inside(np.stack((x_X / away_X, y_X / away_X), 1), owner_X, len(num_points_T), out_wh)
    edges.warp(np.repeat(matrix_T33, num_points_T, axis=0))
    is_inside_P, is_crossing_P = edges.against(out_wh)
    has_any_P = edges.num_samples_P > 0
    x_X, y_X, owner_X = edges.points_of(np.flatnonzero(is_crossing_P & has_any_P))
    whole = np.flatnonzero(is_inside_P & has_any_P)
    ends = [edges.ends_of(whole), (x_X, y_X, owner_X)]
    x_X, y_X, owner_X = (np.concatenate(parts) for parts in zip(*ends, strict=True))
    return box_inside(np.stack((x_X, y_X), 1), owner_X, len(num_points_T), out_wh)


def box_inside(point_X2: np.ndarray, owner_X: np.ndarray, num_boxes: int, out_wh: tuple[int, int]) -> np.ndarray:
    """Box around those of each owner's points that are inside the output, [T, 4]; zeros if none is right of x = 0."""
    x_X, y_X = point_X2.T
    inside = np.flatnonzero((x_X >= 0) & (x_X <= out_wh[0]) & (y_X >= 0) & (y_X <= out_wh[1]))
    owner_X = owner_X[inside]
    box_4T = np.repeat([[np.inf], [np.inf], [-np.inf], [-np.inf]], num_boxes, axis=1)
    for axis, place_X in enumerate((x_X[inside], y_X[inside])):
        np.minimum.at(box_4T[axis], owner_X, place_X)
        np.maximum.at(box_4T[axis + 2], owner_X, place_X)
    box_4T[:, ~(box_4T[2] > 0)] = 0
    return np.ascontiguousarray(box_4T.T)


def resample(polygon_P2: np.ndarray) -> np.ndarray:
    """The 1000 points along one closed polygon, float64 [1000, 2]."""
    edges = _Edges(polygon_P2, np.array([len(polygon_P2)]))
    along_X = np.arange(RESAMPLED) * (len(polygon_P2) / (RESAMPLED - 1))
    # The last point is the first one again: it lies at the end of the last edge.
    edge_X = np.minimum(along_X.astype(np.int64), len(polygon_P2) - 1)
    return np.stack(tuple(edges.at(edge_X, along_X - edge_X)), 1)


class _Edges:
    """All edges of T closed polygons, with the points that lie on each."""

    def __init__(self, point_P2: np.ndarray, num_points_T: np.ndarray) -> None:
        self._x_P, self._y_P = point_P2.T.astype(np.float64, order="C")
        first_T = offsets(num_points_T)
        self.owner_P = np.repeat(np.arange(len(num_points_T)), num_points_T)
        number_P = np.arange(len(point_P2)) - np.repeat(first_T[:-1], num_points_T)
        self._number_P = number_P
        self._next_P = np.arange(1, len(point_P2) + 1)
        has_points = num_points_T > 0
        self._next_P[first_T[1:][has_points] - 1] = first_T[:-1][has_points]
        self._per_sample_P = np.repeat(num_points_T / (RESAMPLED - 1), num_points_T)
        per_edge_P = np.repeat((RESAMPLED - 1) / np.maximum(num_points_T, 1), num_points_T)
        # A point on a corner may be counted to either of its edges, or to both: it is the same.
        self._first_P = np.ceil(number_P * per_edge_P).astype(np.int64)
        self._last_P = np.minimum((number_P + 1) * per_edge_P, RESAMPLED - 1).astype(np.int64)
        self.num_samples_P = np.maximum(self._last_P - self._first_P + 1, 0)

    def warp(self, matrix_P33: np.ndarray) -> None:
        """Take the corners through affine matrices; points between them follow."""
        self._x_P, self._y_P, _ = warped_rows(self._x_P, self._y_P, matrix_P33)

    def against(self, out_wh: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Whether an edge lies inside the output as a whole, and whether it may cross its border; bool [P] each."""
        is_inside_P, is_beyond_P = np.ones(len(self._x_P), bool), np.zeros(len(self._x_P), bool)
        for begin_P, most in zip((self._x_P, self._y_P), out_wh, strict=True):
            is_low_P, is_high_P = begin_P < 0, begin_P > most
            is_inside_P &= ~(is_low_P | is_high_P)
            is_beyond_P |= (is_low_P & is_low_P[self._next_P]) | (is_high_P & is_high_P[self._next_P])
        is_inside_P = is_inside_P & is_inside_P[self._next_P]
        return is_inside_P, ~is_inside_P & ~is_beyond_P

    def at(self, edge_X: np.ndarray, share_X: np.ndarray) -> Iterator[np.ndarray]:
        """x and y at a share of the way along edges."""
        next_X = self._next_P[edge_X]
        for place_P in (self._x_P, self._y_P):
            begin_X = place_P[edge_X]
            yield begin_X + share_X * (place_P[next_X] - begin_X)

    def points_of(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, y and owner of all points on the chosen edges."""
        sample_X, place_X = ranges(self._first_P[chosen], self.num_samples_P[chosen])
        return self._sampled(chosen[place_X], sample_X)

    def ends_of(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, y and owner of the first and the last point on the chosen edges."""
        return self._sampled(np.tile(chosen, 2), np.concatenate((self._first_P[chosen], self._last_P[chosen])))

    def _sampled(self, edge_X: np.ndarray, sample_X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x_X, y_X = self.at(edge_X, sample_X * self._per_sample_P[edge_X] - self._number_P[edge_X])
        return x_X, y_X, self.owner_P[edge_X]


def warped_rows(x_X: np.ndarray, y_X: np.ndarray, matrix_X33: np.ndarray) -> Iterator[np.ndarray]:
    """The three rows of matrices [..., 3, 3] times (x, y, 1)."""
    for row in range(3):
        yield matrix_X33[..., row, 0] * x_X + matrix_X33[..., row, 1] * y_X + matrix_X33[..., row, 2]


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
    """As `boxes_by_numpy`, by polygons.c where it can be used."""
    if perspective or (compiled := compiled_boxes()) is None:
        return boxes_by_numpy(point_P2, num_points_T, matrix_T33, out_wh, perspective=perspective)
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
    expected = boxes_by_numpy(point_P2, num_points_T, matrix_T33, (100, 80), perspective=False)
    return np.array_equal(boxes(point_P2, num_points_T, matrix_T33, (100, 80)), expected)


LEAST_AREA, LEAST_AREA_POLYGONS = 0.10, 0.01
"""Share of its area that a label must keep."""


class WarpedLabels(NamedTuple):
    """Kept labels of M samples, in their order."""

    sample_T: np.ndarray
    """int64, ascending."""
    class_T: np.ndarray
    """float32."""
    box_T4: np.ndarray
    """float32 corners x1, y1, x2, y2 in output pixels."""


def warp_labels(labels: CanvasLabels, sheets: Sheets, *, out_wh: tuple[int, int], perspective: bool) -> WarpedLabels:
    """New boxes of all labels, less those that are too small, too thin or mostly outside.

    A sheet with a polygon goes by polygons; its labels that have none take part with their four corners.
    """
    sheet_T = labels.sheet_T
    if perspective:
        box_T4 = boxes_of_corners(labels.box_T4, sheets.matrix_Q33, sheet_T, out_wh)
    else:
        box_T4 = warped_boxes(labels.box_T4, sheets.matrix_Q33, sheet_T).clip(0, np.tile(out_wh, 2))
    least_T: np.ndarray | float = LEAST_AREA
    has_polygons_Q = labels.has_polygons_Q
    if has_polygons_Q is None:
        has_polygons_Q = _sheets_with_polygons(labels, len(sheets.kind_Q))
    if has_polygons_Q.any():
        by_points_T = has_polygons_Q[sheet_T]
        point_P2, num_points_T = _with_corners(labels, by_points_T)
        matrix_T33 = sheets.matrix_Q33[sheet_T[by_points_T]]
        box_T4[by_points_T] = boxes_of_polygons(point_P2, num_points_T, matrix_T33, out_wh, perspective=perspective)
        least_T = np.where(by_points_T, LEAST_AREA_POLYGONS, LEAST_AREA)
    before_T4 = labels.box_T4 * sheets.scale_Q[sheet_T, None]
    kept_T = np.flatnonzero(are_candidates(before_T4, box_T4, least_T))
    return WarpedLabels(sheets.sample_Q[sheet_T[kept_T]], labels.class_T[kept_T], box_T4[kept_T].astype(np.float32))


def are_candidates(before_T4: np.ndarray, after_T4: np.ndarray, least_area: np.ndarray | float) -> np.ndarray:
    """Whether a box is still worth learning: over 2 px, enough of its area left, sides within 1 : 20; bool [T]."""
    w1, h1 = (before_T4[:, 2:] - before_T4[:, :2]).T
    w2, h2 = (after_T4[:, 2:] - after_T4[:, :2]).T
    epsilon = 1e-16
    aspect = np.maximum(w2 / (h2 + epsilon), h2 / (w2 + epsilon))
    return np.asarray((w2 > 2) & (h2 > 2) & (w2 * h2 / (w1 * h1 + epsilon) > least_area) & (aspect < 20))


def boxes_of_corners(
    box_T4: np.ndarray, matrix_Q33: np.ndarray, sheet_T: np.ndarray, out_wh: tuple[int, int]
) -> np.ndarray:
    """Box around the four corners, warped in perspective, clipped to the output; float64 [T, 4]."""
    x_T4, y_T4 = box_T4[:, [0, 2, 0, 2]].astype(np.float64), box_T4[:, [1, 3, 3, 1]].astype(np.float64)
    x_T4, y_T4, away_T4 = warped_rows(x_T4, y_T4, matrix_Q33[sheet_T, None])
    x_T4, y_T4 = x_T4 / away_T4, y_T4 / away_T4
    box = np.stack((x_T4.min(1), y_T4.min(1), x_T4.max(1), y_T4.max(1)), axis=1)
    return np.asarray(box.clip(0, np.tile(out_wh, 2)))


def _with_corners(labels: CanvasLabels, chosen_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Polygons of the chosen labels, points and number of points; the corners of its box where a label has none."""
    num_points_T = labels.num_points_T[chosen_T]
    is_bare_T = num_points_T == 0
    if num_points_T.sum() == len(labels.point_P2) and not is_bare_T.any():
        return labels.point_P2, num_points_T
    full_T = np.where(is_bare_T, 4, num_points_T)
    point_P2 = np.empty((int(full_T.sum()), 2), np.float32)
    is_bare_P = np.repeat(is_bare_T, full_T)
    point_P2[is_bare_P] = labels.box_T4[chosen_T][is_bare_T][:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2)
    taken_P, _ = ranges(labels.first_point_T[:-1][chosen_T], num_points_T)
    point_P2[~is_bare_P] = labels.point_P2[taken_P]
    return point_P2, full_T


def _sheets_with_polygons(labels: CanvasLabels, num_sheets: int) -> np.ndarray:
    """Whether any point of a sheet's polygons is not at 0, 0; bool [Q]."""
    owner_P = np.repeat(labels.sheet_T, labels.num_points_T)
    has_Q = np.zeros(num_sheets, bool)
    has_Q[owner_P[(labels.point_P2 != 0).any(axis=1)]] = True
    return has_Q
