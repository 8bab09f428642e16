"""Boxes of polygons that are warped and cut off at the borders of the output.

A polygon is judged by 1000 points along it, equally many on every edge: those inside the output make its box. On an
edge they lie on a line. So where both ends of an edge are inside, all points are, and the first and the last say
enough; where both are beyond the same side, none is. Only edges that cross the border need all their points, a fraction
of the 1000. x and y are arrays of their own: NumPy is faster so.

Dimension key:  T polygons   P points, each the beginning of an edge   X points looked at
"""

from collections.abc import Iterator

import numpy as np

from flatout.yolo.augment.labels import offsets, ranges

RESAMPLED = 1000


def boxes_of_polygons(
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
