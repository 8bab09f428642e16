"""Labels through the warp: new boxes, and which of them are worth keeping.

Dimension key:  Q sheets   T labels   P polygon points   E polygon edges   X points looked at
"""

from typing import NamedTuple

import numpy as np

from flatout.yolo.augment.canvas_labels import CanvasLabels, offsets, ranges
from flatout.yolo.augment.layout import Sheets
from flatout.yolo.augment.warp_boxes import warped_boxes

RESAMPLED = 1000
"""A polygon is judged by so many points along it."""
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
    corners_T42 = box_T4[:, [0, 1, 2, 3, 0, 3, 2, 1]].reshape(-1, 4, 2).astype(np.float64)
    corners_T42 = _warp_points(corners_T42, matrix_Q33[sheet_T, None], perspective=True)
    box = np.concatenate((corners_T42.min(axis=1), corners_T42.max(axis=1)), axis=1)
    return np.asarray(box.clip(0, np.tile(out_wh, 2)))


def boxes_of_polygons(
    point_P2: np.ndarray,
    num_points_T: np.ndarray,
    matrix_T33: np.ndarray,
    out_wh: tuple[int, int],
    *,
    perspective: bool,
) -> np.ndarray:
    """Box around those of a polygon's 1000 warped points that are inside the output; zeros if none is; [T, 4].

    Along an edge the points lie on a line. So where the first and the last point of an edge are inside, all are, and
    these two say enough; where both are beyond the same side, none is. Only edges that cross the border need all
    their points, a fraction of the 1000.
    """
    polygons = _Polygons(point_P2, num_points_T, matrix_T33, perspective)
    edges = _edges(num_points_T)
    (x0_E, y0_E), (x1_E, y1_E) = (polygons.warped(end_E, edges.owner_E) for end_E in (edges.first_E, edges.last_E))
    width, height = out_wh
    left_E, right_E = np.minimum(x0_E, x1_E), np.maximum(x0_E, x1_E)
    top_E, bottom_E = np.minimum(y0_E, y1_E), np.maximum(y0_E, y1_E)
    is_inside_E = (left_E >= 0) & (right_E <= width) & (top_E >= 0) & (bottom_E <= height)
    is_outside_E = (right_E < 0) | (left_E > width) | (bottom_E < 0) | (top_E > height)
    # A plane that tilts through the eye turns lines inside out: then every point is looked at.
    is_crossing_E = np.ones(len(x0_E), bool) if perspective else ~is_inside_E & ~is_outside_E
    crossing = np.flatnonzero(is_crossing_E)
    sample_X, edge_X = ranges(edges.first_E[crossing], (edges.last_E - edges.first_E + 1)[crossing])
    owner_X = edges.owner_E[crossing][edge_X]
    x_X, y_X = polygons.warped(sample_X, owner_X)
    simple = np.flatnonzero(is_inside_E & ~is_crossing_E)
    owner_S = edges.owner_E[simple]
    point_2 = (
        np.concatenate((x0_E[simple], x1_E[simple], x_X)),
        np.concatenate((y0_E[simple], y1_E[simple], y_X)),
    )
    return box_inside(np.stack(point_2, 1), np.concatenate((owner_S, owner_S, owner_X)), len(num_points_T), out_wh)


def box_inside(point_X2: np.ndarray, owner_X: np.ndarray, num_boxes: int, out_wh: tuple[int, int]) -> np.ndarray:
    """Box around those of each owner's points that are inside the output, [T, 4]; zeros if none is right of x = 0."""
    x_X, y_X = point_X2.T
    inside = np.flatnonzero((x_X >= 0) & (x_X <= out_wh[0]) & (y_X >= 0) & (y_X <= out_wh[1]))
    point_X2, owner_X = point_X2[inside], owner_X[inside]
    box_4T = np.repeat([[np.inf], [np.inf], [-np.inf], [-np.inf]], num_boxes, axis=1)
    for axis in range(2):
        np.minimum.at(box_4T[axis], owner_X, point_X2[:, axis])
        np.maximum.at(box_4T[axis + 2], owner_X, point_X2[:, axis])
    box_4T[:, ~(box_4T[2] > 0)] = 0
    return np.ascontiguousarray(box_4T.T)


def resample(polygon_P2: np.ndarray) -> np.ndarray:
    """1000 points along one closed polygon, equally many on every edge; float64 [1000, 2]."""
    polygon = _Polygons(polygon_P2, np.array([len(polygon_P2)]), np.eye(3)[None], perspective=False)
    return np.stack(polygon.points(np.arange(RESAMPLED), np.zeros(RESAMPLED, np.int64)), 1)


class _Polygons:
    """T closed polygons, by the 1000 points along each. x and y are arrays of their own: NumPy is faster so."""

    def __init__(
        self, point_P2: np.ndarray, num_points_T: np.ndarray, matrix_T33: np.ndarray, perspective: bool
    ) -> None:
        self._x_P, self._y_P = point_P2.T.astype(np.float64, order="C")
        self._num_points_T, self._first_T = num_points_T, offsets(num_points_T)
        self._per_sample_T = num_points_T / (RESAMPLED - 1)
        self._matrix_T33 = matrix_T33
        self._perspective = perspective

    def points(self, sample_E: np.ndarray, owner_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Point number sample_E of the 1000 along polygon owner_E: x and y, float64 [E] each."""
        count_E, first_E = self._num_points_T[owner_E], self._first_T[owner_E]
        along_E = sample_E * self._per_sample_T[owner_E]
        # The last sample is the first point again: it lies at the end of the last edge.
        edge_E = np.minimum(along_E.astype(np.int64), count_E - 1)
        begin_E, share_E = first_E + edge_E, along_E - edge_E
        end_E = np.where(edge_E == count_E - 1, first_E, begin_E + 1)
        x_E, y_E = self._x_P[begin_E], self._y_P[begin_E]
        return x_E + share_E * (self._x_P[end_E] - x_E), y_E + share_E * (self._y_P[end_E] - y_E)

    def warped(self, sample_E: np.ndarray, owner_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `points`, in output pixels."""
        x_E, y_E = self.points(sample_E, owner_E)
        rows = (self._matrix_T33[:, row] for row in range(3 if self._perspective else 2))
        across_E, down_E, *away_E = (
            row_T3[:, 0][owner_E] * x_E + row_T3[:, 1][owner_E] * y_E + row_T3[:, 2][owner_E] for row_T3 in rows
        )
        return (across_E / away_E[0], down_E / away_E[0]) if away_E else (across_E, down_E)


class _Edges(NamedTuple):
    """Edges of T polygons that have a sample on them, with the first and the last one."""

    owner_E: np.ndarray
    first_E: np.ndarray
    last_E: np.ndarray


def _edges(num_points_T: np.ndarray) -> _Edges:
    edge_E, owner_E = ranges(np.zeros(len(num_points_T), np.int64), num_points_T)
    per_edge_E = (RESAMPLED - 1) / num_points_T[owner_E]
    # A sample on a corner may be counted to either of its edges, or to both: the point is the same.
    first_E = np.ceil(edge_E * per_edge_E).astype(np.int64)
    last_E = np.minimum((edge_E + 1) * per_edge_E, RESAMPLED - 1).astype(np.int64)
    has_any_E = first_E <= last_E
    return _Edges(owner_E[has_any_E], first_E[has_any_E], last_E[has_any_E])


def _with_corners(labels: CanvasLabels, chosen_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Polygons of the chosen labels, points and number of points; the corners of its box where a label has none."""
    num_points_T = labels.num_points_T[chosen_T]
    is_bare_T = num_points_T == 0
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


def _warp_points(point_2: np.ndarray, matrix_33: np.ndarray, *, perspective: bool) -> np.ndarray:
    """Points [..., 2] through matrices [..., 3, 3], float64."""
    x, y = point_2[..., 0], point_2[..., 1]
    rows = [matrix_33[..., row, 0] * x + matrix_33[..., row, 1] * y + matrix_33[..., row, 2] for row in range(3)]
    warped = np.stack(rows[:2], -1)
    return warped / rows[2][..., None] if perspective else warped
