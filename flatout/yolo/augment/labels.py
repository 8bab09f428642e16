"""Labels of canvases: gathered from the data set, warped, filtered and made targets, for a whole micro-batch.

    data set -> gather_labels: canvas pixels -> warp_labels: boxes in the output, filtered -> to_targets

The new box of a label with a polygon is that of the warped polygon; polygons.c computes it where it can be compiled.

Dimension key:  M samples   Q canvases   T labels, boxes, polygons or targets
                P polygon points, each the beginning of an edge   X points along polygons
                G ranges, or tiles with an image, of all canvases
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.yolo.augment.c_library import NotCompiled, load_library
from flatout.yolo.augment.draw import PLAIN
from flatout.yolo.augment.layout import Canvases
from flatout.yolo.data.image_set import Labels, offsets, ranges

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("polygons.c")

MIN_AREA, MIN_AREA_POLYGONS = 0.10, 0.01
"""Fraction of its area that a label must keep: by its box, and on canvases with polygons."""

RESAMPLED = 1000
"""Points along a polygon that represent it."""


# Labels on canvases: gathered from the data set for a whole micro-batch.


class CanvasLabels(NamedTuple):
    """Labels of Q canvases, one after the other; a label without a polygon has no points."""

    canvas_T: np.ndarray
    """int64, ascending."""
    class_T: np.ndarray
    """float32."""
    box_T4: np.ndarray
    """float32 corners x1, y1, x2, y2 in canvas pixels."""
    point_P2: np.ndarray
    """float32 x, y in canvas pixels."""
    first_point_T: np.ndarray
    """int64 [T + 1]: label t has the points first_point_T[t] to first_point_T[t + 1]."""
    has_polygons_Q: np.ndarray | None = None
    """bool: whether a canvas has any polygon, if some of its labels were left out; else None."""
    tile_T: np.ndarray | None = None
    """int64: number of the label's tile on its canvas, if known."""
    label_T: np.ndarray | None = None
    """int64: number of the label in the data set, if known; -1 for a copy."""

    @property
    def num_points_T(self) -> np.ndarray:
        return np.diff(self.first_point_T)

    def polygon(self, label: int) -> np.ndarray:
        return self.point_P2[self.first_point_T[label] : self.first_point_T[label + 1]]


class VisibleLabels(NamedTuple):
    """Labels of Q canvases that may be visible, in the order of canvases and tiles, without their points."""

    label_T: np.ndarray
    """int64, number of the label in the data set."""
    canvas_T: np.ndarray
    """int64, ascending."""
    tile_T: np.ndarray
    """int64, number of the label's tile on its canvas."""
    box_T4: np.ndarray
    """float32 corners in canvas pixels."""
    num_points_T: np.ndarray
    """int64; 0 on canvases of a single image, where boxes are used."""
    flat_tile_T: np.ndarray
    """int64, number of the label's tile among all G tiles."""
    to_canvas: "_ToCanvas"
    """The transformation of each of the G tiles."""
    has_polygons_Q: np.ndarray | None
    """bool: whether any point of a canvas's polygons is not at 0, 0, invisible labels included; None if `outlines` was
    False or nothing has polygons."""

    def select(self, chosen: np.ndarray) -> "VisibleLabels":
        """The labels with these numbers."""
        return self._replace(**{name: getattr(self, name)[chosen] for name in self._fields[:6]})


def gather_labels(labels: Labels, canvases: Canvases, *, visible_in: tuple[int, int] | None = None) -> CanvasLabels:
    """The labels of every tile, in the order of canvases and tiles; those of mosaics are clipped to their canvas.

    With `visible_in`, labels that are not visible are left out (see `find_visible_labels`).
    """
    found = find_visible_labels(labels, canvases, visible_in=visible_in, outlines=visible_in is not None)
    point_P, owner_P = ranges(labels.first_point_T[found.label_T], found.num_points_T)
    point_P2 = found.to_canvas.select(found.flat_tile_T[owner_P])(labels.point_P2.take(point_P, axis=0))
    return CanvasLabels(
        found.canvas_T,
        labels.class_box_T5[found.label_T, 0],
        found.box_T4,
        point_P2,
        offsets(found.num_points_T),
        found.has_polygons_Q,
        found.tile_T,
        found.label_T,
    )


def find_visible_labels(
    labels: Labels, canvases: Canvases, *, visible_in: tuple[int, int] | None, outlines: bool = True
) -> VisibleLabels:
    """The labels of every tile; with `visible_in`, only those that reach an output of this width and height.

    For affine warps. Two in three labels of a mosaic do not, and none of these would be kept. `outlines`: use the
    outlines of polygons for this, and find out which canvases have polygons.
    """
    canvas_G, tile_G = np.nonzero(canvases.image_Q9 >= 0)
    image_G = canvases.image_Q9[canvas_G, tile_G]
    begin_G = labels.first_N[image_G]
    label_T, flat_tile_T = ranges(begin_G, labels.first_N[image_G + 1] - begin_G)
    # float32 from here on, as in YOLOv7, so that boxes near a limit of the filter fall on the same side.
    of_tile = _ToCanvas(
        canvases.label_size_Q92[canvas_G, tile_G].astype(np.float32),
        canvases.label_origin_Q92[canvas_G, tile_G].astype(np.float32),
        np.where(canvases.kind_Q == PLAIN, -np.inf, 0)[canvas_G, None].astype(np.float32),
        np.where(canvases.kind_Q[:, None] == PLAIN, np.inf, canvases.canvas_wh_Q2)[canvas_G].astype(np.float32),
    )
    to_canvas = of_tile.select(flat_tile_T)
    canvas_T, class_box_T5 = canvas_G[flat_tile_T], labels.class_box_T5[label_T]
    centre_T2, half_T2 = class_box_T5[:, 1:3], class_box_T5[:, 3:5] / 2
    box_T4 = np.concatenate((to_canvas(centre_T2 - half_T2), to_canvas(centre_T2 + half_T2)), axis=1)
    num_points_T = labels.first_point_T[label_T + 1] - labels.first_point_T[label_T]
    num_points_T = np.where(canvases.kind_Q[canvas_T] == PLAIN, 0, num_points_T)
    outer_T4, has_polygons_Q = box_T4, None
    if outlines and len(labels.point_P2):
        low_T2, high_T2 = (labels.outline_T4[label_T, half : half + 2] for half in (0, 2))
        outline_T4 = np.concatenate((to_canvas(low_T2), to_canvas(high_T2)), axis=1)
        outer_T4 = np.where(num_points_T[:, None] > 0, outline_T4, box_T4)
        has_polygons_Q = np.zeros(len(canvases.kind_Q), bool)
        has_polygons_Q[canvas_T[(num_points_T > 0) & (outline_T4[:, 2:] > 0).any(1)]] = True
    everything = VisibleLabels(
        label_T, canvas_T, tile_G[flat_tile_T], box_T4, num_points_T, flat_tile_T, of_tile, has_polygons_Q
    )
    if visible_in is None:
        return everything
    return everything.select(np.flatnonzero(may_be_visible(outer_T4, canvases.matrix_Q33, canvas_T, visible_in)))


def may_be_visible(
    box_T4: np.ndarray, matrix_Q33: np.ndarray, canvas_T: np.ndarray, out_wh: tuple[int, int]
) -> np.ndarray:
    """Whether any part of a box may lie in the output of an affine warp, bool [T]."""
    warped_T4 = warped_boxes(box_T4, matrix_Q33, canvas_T)
    # A margin of one pixel: labels at the border are decided by the exact computation.
    low_T2, high_T2 = warped_T4[:, :2], warped_T4[:, 2:]
    return np.asarray(((high_T2 > -1) & (low_T2 < np.array(out_wh) + 1)).all(1))


class _ToCanvas(NamedTuple):
    """Maps coordinates relative to an image to pixels of the canvas that it is a tile of, clipped to that canvas; one
    map for each of G tiles, float32."""

    size_G2: np.ndarray
    origin_G2: np.ndarray
    low_G1: np.ndarray
    high_G2: np.ndarray

    def select(self, tile_T: np.ndarray) -> "_ToCanvas":
        """For the tiles with these numbers."""
        return _ToCanvas(*(array.take(tile_T, axis=0) for array in self))

    def __call__(self, point_G2: np.ndarray) -> np.ndarray:
        """Transform one point of each tile, and clip it to its canvas."""
        point_G2 = self.size_G2 * point_G2 + self.origin_G2
        np.maximum(point_G2, self.low_G1, out=point_G2)
        return np.asarray(np.minimum(point_G2, self.high_G2, out=point_G2))


# Labels through the warp.


class WarpedLabels(NamedTuple):
    """The labels of M samples that are kept, in the order of samples."""

    sample_T: np.ndarray
    """int64, ascending."""
    class_T: np.ndarray
    """float32."""
    box_T4: np.ndarray
    """float32 corners x1, y1, x2, y2 in output pixels."""
    label_T: np.ndarray
    """int64: number of the label in the data set; -1 for a copy, or if it is not known."""


def warp_labels(
    labels: CanvasLabels, canvases: Canvases, *, out_wh: tuple[int, int], perspective: bool
) -> WarpedLabels:
    """New boxes of all labels, without those that are too small, too thin or mostly outside.

    On a canvas with any polygon, boxes are computed from polygons; a label without one counts as its four corners.
    """
    canvas_T = labels.canvas_T
    if perspective:
        box_T4 = boxes_of_corners(labels.box_T4, canvases.matrix_Q33, canvas_T, out_wh)
    else:
        box_T4 = warped_boxes(labels.box_T4, canvases.matrix_Q33, canvas_T).clip(0, np.tile(out_wh, 2))
    min_area_T: np.ndarray | float = MIN_AREA
    has_polygons_Q = labels.has_polygons_Q
    if has_polygons_Q is None:
        has_polygons_Q = _canvases_with_polygons(labels, len(canvases.kind_Q))
    if has_polygons_Q.any():
        by_points_T = has_polygons_Q[canvas_T]
        point_P2, num_points_T = _with_corners(labels, by_points_T)
        matrix_T33 = canvases.matrix_Q33[canvas_T[by_points_T]]
        box_T4[by_points_T] = boxes_of_polygons(point_P2, num_points_T, matrix_T33, out_wh, perspective=perspective)
        min_area_T = np.where(by_points_T, MIN_AREA_POLYGONS, MIN_AREA)
    before_T4 = labels.box_T4 * canvases.scale_Q[canvas_T, None]
    kept_T = np.flatnonzero(are_trainable(before_T4, box_T4, min_area_T))
    label_T = np.full(len(canvas_T), -1) if labels.label_T is None else labels.label_T
    sample_T = canvases.sample_Q[canvas_T[kept_T]]
    return WarpedLabels(sample_T, labels.class_T[kept_T], box_T4[kept_T].astype(np.float32), label_T[kept_T])


def are_trainable(before_T4: np.ndarray, after_T4: np.ndarray, least_area: np.ndarray | float) -> np.ndarray:
    """Whether a box is kept for training: sides over 2 px and within 1 : 20, enough of its area left; bool [T]."""
    w1, h1 = (before_T4[:, 2:] - before_T4[:, :2]).T
    w2, h2 = (after_T4[:, 2:] - after_T4[:, :2]).T
    epsilon = 1e-16
    aspect = np.maximum(w2 / (h2 + epsilon), h2 / (w2 + epsilon))
    return np.asarray((w2 > 2) & (h2 > 2) & (w2 * h2 / (w1 * h1 + epsilon) > least_area) & (aspect < 20))


def warped_boxes(box_T4: np.ndarray, matrix_Q33: np.ndarray, canvas_T: np.ndarray) -> np.ndarray:
    """Box around the four corners of each box after an affine warp, float64 [T, 4]; `canvas_T` selects the matrix.

    A corner's coordinate is (a x + b y) + c. Sums are monotonic even when rounded, so the minimum over the four corners
    is the smaller a x plus the smaller b y, to the bit, at a third of the work.
    """
    x1_T, y1_T, x2_T, y2_T = box_T4.T.astype(np.float64, order="C")
    result_T4 = np.empty((len(box_T4), 4))
    for axis in (0, 1):
        a_T, b_T, c_T = (matrix_Q33[:, axis, column][canvas_T] for column in range(3))
        by_x, by_y = (a_T * x1_T, a_T * x2_T), (b_T * y1_T, b_T * y2_T)
        for end, extreme in ((axis, np.minimum), (axis + 2, np.maximum)):
            result_T4[:, end] = extreme(*by_x) + extreme(*by_y) + c_T
    return result_T4


def boxes_of_corners(
    box_T4: np.ndarray, matrix_Q33: np.ndarray, canvas_T: np.ndarray, out_wh: tuple[int, int]
) -> np.ndarray:
    """Box around the four corners after a perspective warp, clipped to the output; float64 [T, 4]."""
    x_T4, y_T4 = box_T4[:, [0, 2, 0, 2]].astype(np.float64), box_T4[:, [1, 3, 3, 1]].astype(np.float64)
    x_T4, y_T4, away_T4 = warped_rows(x_T4, y_T4, matrix_Q33[canvas_T, None])
    x_T4, y_T4 = x_T4 / away_T4, y_T4 / away_T4
    box = np.stack((x_T4.min(1), y_T4.min(1), x_T4.max(1), y_T4.max(1)), axis=1)
    return np.asarray(box.clip(0, np.tile(out_wh, 2)))


def _with_corners(labels: CanvasLabels, chosen_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points and number of points of the chosen labels' polygons; the corners of its box for a label without one."""
    num_points_T = labels.num_points_T[chosen_T]
    is_box_only_T = num_points_T == 0
    if num_points_T.sum() == len(labels.point_P2) and not is_box_only_T.any():
        return labels.point_P2, num_points_T
    full_T = np.where(is_box_only_T, 4, num_points_T)
    point_P2 = np.empty((int(full_T.sum()), 2), np.float32)
    is_box_only_P = np.repeat(is_box_only_T, full_T)
    point_P2[is_box_only_P] = labels.box_T4[chosen_T][is_box_only_T][:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2)
    taken_P, _ = ranges(labels.first_point_T[:-1][chosen_T], num_points_T)
    point_P2[~is_box_only_P] = labels.point_P2[taken_P]
    return point_P2, full_T


def _canvases_with_polygons(labels: CanvasLabels, num_canvases: int) -> np.ndarray:
    """Whether any point of a canvas's polygons is not at 0, 0; bool [Q]."""
    owner_P = np.repeat(labels.canvas_T, labels.num_points_T)
    has_Q = np.zeros(num_canvases, bool)
    has_Q[owner_P[(labels.point_P2 != 0).any(axis=1)]] = True
    return has_Q


def to_targets(
    sample_T: np.ndarray, label_T5: np.ndarray, out_wh: tuple[int, int], flip_M2: np.ndarray, *, first_row: int
) -> np.ndarray:
    """Targets as the loss reads them: image in the batch, class, normalised centre and size, flipped; float32 [T, 6].

    `label_T5` holds class and corners in pixels, `sample_T` the number of the sample in its micro-batch, which begins
    at row `first_row` of the batch.
    """
    scale_2 = np.array(out_wh, np.float32)
    low_T2, high_T2 = label_T5[:, 1:3], label_T5[:, 3:5]
    target_T6 = np.empty((len(label_T5), 6), np.float32)
    target_T6[:, 0] = sample_T + first_row
    target_T6[:, 1] = label_T5[:, 0]
    centre_T2 = (low_T2 + high_T2) / 2 / scale_2
    target_T6[:, 2:4] = np.where(flip_M2[sample_T][:, ::-1], 1 - centre_T2, centre_T2)
    target_T6[:, 4:6] = (high_T2 - low_T2) / scale_2
    return target_T6


def target_label_ids(warped: WarpedLabels, count_M: np.ndarray) -> np.ndarray:
    """The field `label_ids`, int32 [T, 1]: for every target its label's number in the data set, -1 for a pasted object.

    `count_M` is the number of targets of each sample; pasted objects come after the sample's own labels.
    """
    id_T1 = np.full((int(count_M.sum()), 1), -1, np.int32)
    own_T = np.arange(len(warped.label_T)) - np.searchsorted(warped.sample_T, warped.sample_T)
    id_T1[offsets(count_M)[warped.sample_T] + own_T, 0] = warped.label_T
    return id_T1


# Boxes of polygons that are warped and clipped to the output.
#
# A polygon is represented by 1000 points along it, equally many on every edge: those inside the output make its box.
# The points of an edge lie on a line. So where both ends of an edge are inside, all its points are, and the first and
# the last are enough; where both ends are beyond the same side, no point is inside. Only edges that cross the border
# need all their points, a fraction of the 1000. x and y are separate arrays, which is faster in NumPy.

Boxes = Callable[[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]], np.ndarray]
"""(points, number of points and matrix of each polygon, output width and height) -> boxes [T, 4]; affine only."""


def boxes_of_polygons(
    point_P2: np.ndarray,
    num_points_T: np.ndarray,
    matrix_T33: np.ndarray,
    out_wh: tuple[int, int],
    *,
    perspective: bool,
) -> np.ndarray:
    """As `boxes_by_numpy`, but by polygons.c where it can be used."""
    if perspective or (compiled := compiled_boxes()) is None:
        return boxes_by_numpy(point_P2, num_points_T, matrix_T33, out_wh, perspective=perspective)
    return compiled(point_P2, num_points_T, matrix_T33, out_wh)


def boxes_by_numpy(
    point_P2: np.ndarray,
    num_points_T: np.ndarray,
    matrix_T33: np.ndarray,
    out_wh: tuple[int, int],
    *,
    perspective: bool,
) -> np.ndarray:
    """Box around the warped points of each polygon that are inside the output, float64 [T, 4]; zeros if none is."""
    edges = _Edges(point_P2, num_points_T)
    if perspective:
        # Points of an edge may lie on both sides of the camera plane, so every point is checked.
        x_X, y_X, owner_X = edges.points_of(np.flatnonzero(edges.num_samples_P))
        x_X, y_X, away_X = warped_rows(x_X, y_X, matrix_T33[owner_X])
        return box_inside(np.stack((x_X / away_X, y_X / away_X), 1), owner_X, len(num_points_T), out_wh)
    edges.warp(np.repeat(matrix_T33, num_points_T, axis=0))
    is_inside_P, is_crossing_P = edges.classify(out_wh)
    has_any_P = edges.num_samples_P > 0
    x_X, y_X, owner_X = edges.points_of(np.flatnonzero(is_crossing_P & has_any_P))
    whole = np.flatnonzero(is_inside_P & has_any_P)
    ends = [edges.ends_of(whole), (x_X, y_X, owner_X)]
    x_X, y_X, owner_X = (np.concatenate(parts) for parts in zip(*ends, strict=True))
    return box_inside(np.stack((x_X, y_X), 1), owner_X, len(num_points_T), out_wh)


def box_inside(point_X2: np.ndarray, owner_X: np.ndarray, num_boxes: int, out_wh: tuple[int, int]) -> np.ndarray:
    """Box around each owner's points that are inside the output, [T, 4]; zeros if none is right of x = 0."""
    x_X, y_X = point_X2.T
    inside = np.flatnonzero((x_X >= 0) & (x_X <= out_wh[0]) & (y_X >= 0) & (y_X <= out_wh[1]))
    owner_X = owner_X[inside]
    box_4T = np.repeat([[np.inf], [np.inf], [-np.inf], [-np.inf]], num_boxes, axis=1)
    for axis, coordinate_X in enumerate((x_X[inside], y_X[inside])):
        np.minimum.at(box_4T[axis], owner_X, coordinate_X)
        np.maximum.at(box_4T[axis + 2], owner_X, coordinate_X)
    box_4T[:, ~(box_4T[2] > 0)] = 0
    return np.ascontiguousarray(box_4T.T)


class _Edges:
    """All edges of T closed polygons, with the points on each."""

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
        # A point on a corner may count for either edge, or for both: the box is the same.
        self._first_P = np.ceil(number_P * per_edge_P).astype(np.int64)
        self._last_P = np.minimum((number_P + 1) * per_edge_P, RESAMPLED - 1).astype(np.int64)
        self.num_samples_P = np.maximum(self._last_P - self._first_P + 1, 0)

    def warp(self, matrix_P33: np.ndarray) -> None:
        """Warp the corners by affine matrices; the points between them follow."""
        self._x_P, self._y_P, _ = warped_rows(self._x_P, self._y_P, matrix_P33)

    def classify(self, out_wh: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Whether an edge lies entirely inside the output, and whether it may cross its border; bool [P] each."""
        is_inside_P, is_beyond_P = np.ones(len(self._x_P), bool), np.zeros(len(self._x_P), bool)
        for begin_P, side in zip((self._x_P, self._y_P), out_wh, strict=True):
            is_low_P, is_high_P = begin_P < 0, begin_P > side
            is_inside_P &= ~(is_low_P | is_high_P)
            is_beyond_P |= (is_low_P & is_low_P[self._next_P]) | (is_high_P & is_high_P[self._next_P])
        is_inside_P = is_inside_P & is_inside_P[self._next_P]
        return is_inside_P, ~is_inside_P & ~is_beyond_P

    def at(self, edge_X: np.ndarray, share_X: np.ndarray) -> Iterator[np.ndarray]:
        """x and y at a fraction of the way along edges."""
        next_X = self._next_P[edge_X]
        for coordinate_P in (self._x_P, self._y_P):
            begin_X = coordinate_P[edge_X]
            yield begin_X + share_X * (coordinate_P[next_X] - begin_X)

    def points_of(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, y and owner of all points on the chosen edges."""
        sample_X, owner_X = ranges(self._first_P[chosen], self.num_samples_P[chosen])
        return self._sampled(chosen[owner_X], sample_X)

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


# The same boxes by polygons.c, to the bit and several times as fast, where there is a C compiler.


@functools.cache
def compiled_boxes() -> Boxes | None:
    """The function of polygons.c, compiled if necessary and compared with NumPy; None, with a warning, if unusable."""
    try:
        boxes = bind_polygon_boxes(load_library(SOURCE))
    except NotCompiled as error:
        logger.warning("polygons.c is not compiled (%s): labels with polygons take several times as long.", error)
        return None
    if not matches_numpy(boxes):
        logger.warning("polygons.c disagrees with NumPy and is not used: labels with polygons take much longer.")
        return None
    return boxes


def bind_polygon_boxes(library: ctypes.CDLL) -> Boxes:
    """The function of polygons.c, called with arrays."""
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


def matches_numpy(boxes: Boxes) -> bool:
    """Whether the boxes equal NumPy's to the bit, for random polygons in, across and beyond the output."""
    rng = np.random.default_rng(0)
    num_points_T = rng.integers(0, 60, 64)
    point_P2 = rng.uniform(0, 100, (int(num_points_T.sum()), 2)).astype(np.float32)
    matrix_T33 = np.tile(np.eye(3), (64, 1, 1))
    matrix_T33[:, :2] += rng.normal(0, 0.5, (64, 2, 3)) * (1, 1, 100)
    expected = boxes_by_numpy(point_P2, num_points_T, matrix_T33, (100, 80), perspective=False)
    return np.array_equal(boxes(point_P2, num_points_T, matrix_T33, (100, 80)), expected)
