"""Labels on the canvases of sheets: gathered from the data set for a whole micro-batch, in pixels.

Dimension key:  Q sheets   T labels   P polygon points   G ranges, or places: tiles that show a picture

Labels through the warp: new boxes, and which of them are worth keeping.

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
from flatout.yolo.augment.draw import PLAIN
from flatout.yolo.augment.layout import Sheets
from flatout.yolo.data.image_set import Labels

# Boxes through affine warps.
#
# Dimension key:  Q sheets   T boxes


def warped_boxes(box_T4: np.ndarray, matrix_Q33: np.ndarray, sheet_T: np.ndarray) -> np.ndarray:
    """Box around the four warped corners of each box, float64 [T, 4]; sheet_T says whose matrix is its.

    A corner's place is (a x + b y) + c. Sums are monotonic, also when rounded: so the least of the four corners is the
    lesser a x plus the lesser b y, to the bit, at a third of the work.
    """
    x1_T, y1_T, x2_T, y2_T = box_T4.T.astype(np.float64, order="C")
    result_T4 = np.empty((len(box_T4), 4))
    for axis in (0, 1):
        a_T, b_T, c_T = (matrix_Q33[:, axis, column][sheet_T] for column in range(3))
        by_x, by_y = (a_T * x1_T, a_T * x2_T), (b_T * y1_T, b_T * y2_T)
        for end, extreme in ((axis, np.minimum), (axis + 2, np.maximum)):
            result_T4[:, end] = extreme(*by_x) + extreme(*by_y) + c_T
    return result_T4


def are_seen(box_T4: np.ndarray, matrix_Q33: np.ndarray, sheet_T: np.ndarray, out_wh: tuple[int, int]) -> np.ndarray:
    """Whether any of a box may lie in the output, bool [T]."""
    warped_T4 = warped_boxes(box_T4, matrix_Q33, sheet_T)
    # A little more than the output: what just touches it is decided by those who look at it closely.
    low_T2, high_T2 = warped_T4[:, :2], warped_T4[:, 2:]
    return np.asarray(((high_T2 > -1) & (low_T2 < np.array(out_wh) + 1)).all(1))


class CanvasLabels(NamedTuple):
    """Labels of Q sheets one after the other; what has no polygon has no points."""

    sheet_T: np.ndarray
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
    """bool: whether a sheet has any polygon, where some of its labels have been left out."""
    tile_T: np.ndarray | None = None
    """int64: which tile of its sheet a label is on, where that is known."""

    @property
    def num_points_T(self) -> np.ndarray:
        return np.diff(self.first_point_T)

    def polygon(self, label: int) -> np.ndarray:
        return self.point_P2[self.first_point_T[label] : self.first_point_T[label + 1]]


class Candidates(NamedTuple):
    """Labels of Q sheets that may be seen, in the order of sheets and tiles: which ones, not yet their points."""

    label_T: np.ndarray
    """int64, number in the data set."""
    sheet_T: np.ndarray
    """int64, ascending."""
    tile_T: np.ndarray
    """int64, which tile of its sheet a label is on."""
    box_T4: np.ndarray
    """float32 corners in canvas pixels."""
    num_points_T: np.ndarray
    """int64; 0 on sheets of a single picture, which go by boxes."""
    place_T: np.ndarray
    """int64, which of the G places a label is on."""
    to_canvas: "_ToCanvas"
    """Of the G places."""
    has_polygons_Q: np.ndarray | None
    """bool: whether any point of a sheet's polygons is not at 0, 0, labels that are not seen included; None: not asked,
    or nothing has polygons."""

    def taken(self, chosen: np.ndarray) -> "Candidates":
        """The labels of these numbers."""
        label_T, sheet_T, tile_T, box_T4, num_points_T, place_T = (each[chosen] for each in self[:6])
        return Candidates(label_T, sheet_T, tile_T, box_T4, num_points_T, place_T, self.to_canvas, self.has_polygons_Q)


def list_candidates(
    labels: Labels, sheets: Sheets, *, seen_in: tuple[int, int] | None, outlines: bool = True
) -> Candidates:
    """The labels of every tile, less those that do not reach the output of affine warps, `seen_in` wide and high.

    These are two in three of a mosaic's, and none of them would be kept. `outlines` are needed for that, and to know
    which sheets have polygons.
    """
    sheet_G, tile_G = np.nonzero(sheets.picture_Q9 >= 0)
    picture_G = sheets.picture_Q9[sheet_G, tile_G]
    begin_G = labels.first_N[picture_G]
    label_T, place_T = ranges(begin_G, labels.first_N[picture_G + 1] - begin_G)
    # float32 from here on, as in YOLOv7, so that boxes near a limit of the candidate filter fall on the same side.
    of_tile = _ToCanvas(
        sheets.label_size_Q92[sheet_G, tile_G].astype(np.float32),
        sheets.label_origin_Q92[sheet_G, tile_G].astype(np.float32),
        np.where(sheets.kind_Q == PLAIN, -np.inf, 0)[sheet_G, None].astype(np.float32),
        np.where(sheets.kind_Q[:, None] == PLAIN, np.inf, sheets.canvas_Q2)[sheet_G].astype(np.float32),
    )
    to_canvas = of_tile.taken(place_T)
    sheet_T, class_box_T5 = sheet_G[place_T], labels.class_box_T5[label_T]
    centre_T2, half_T2 = class_box_T5[:, 1:3], class_box_T5[:, 3:5] / 2
    box_T4 = np.concatenate((to_canvas(centre_T2 - half_T2), to_canvas(centre_T2 + half_T2)), axis=1)
    num_points_T = labels.first_point_T[label_T + 1] - labels.first_point_T[label_T]
    num_points_T = np.where(sheets.kind_Q[sheet_T] == PLAIN, 0, num_points_T)
    outer_T4, has_polygons_Q = box_T4, None
    if outlines and len(labels.point_P2):
        low_T2, high_T2 = (labels.outline_T4[label_T, half : half + 2] for half in (0, 2))
        outline_T4 = np.concatenate((to_canvas(low_T2), to_canvas(high_T2)), axis=1)
        outer_T4 = np.where(num_points_T[:, None] > 0, outline_T4, box_T4)
        has_polygons_Q = np.zeros(len(sheets.kind_Q), bool)
        has_polygons_Q[sheet_T[(num_points_T > 0) & (outline_T4[:, 2:] > 0).any(1)]] = True
    everything = Candidates(label_T, sheet_T, tile_G[place_T], box_T4, num_points_T, place_T, of_tile, has_polygons_Q)
    if seen_in is None:
        return everything
    return everything.taken(np.flatnonzero(are_seen(outer_T4, sheets.matrix_Q33, sheet_T, seen_in)))


def gather_labels(labels: Labels, sheets: Sheets, *, seen_in: tuple[int, int] | None = None) -> CanvasLabels:
    """The labels of every tile, in the order of sheets and tiles; those of mosaics are clipped to their canvas.

    With `seen_in` those that are not seen are left out (see `list_candidates`).
    """
    found = list_candidates(labels, sheets, seen_in=seen_in, outlines=seen_in is not None)
    point_P, owner_P = ranges(labels.first_point_T[found.label_T], found.num_points_T)
    point_P2 = found.to_canvas.taken(found.place_T[owner_P])(labels.point_P2.take(point_P, axis=0))
    return CanvasLabels(
        found.sheet_T,
        labels.class_box_T5[found.label_T, 0],
        found.box_T4,
        point_P2,
        offsets(found.num_points_T),
        found.has_polygons_Q,
        found.tile_T,
    )


class _ToCanvas(NamedTuple):
    """From a picture's coordinates to pixels of the canvas that it is a tile of, for G tiles; float32."""

    size_G2: np.ndarray
    origin_G2: np.ndarray
    least_G1: np.ndarray
    most_G2: np.ndarray

    def taken(self, tile_T: np.ndarray) -> "_ToCanvas":
        """For the tiles of these numbers."""
        return _ToCanvas(*(array.take(tile_T, axis=0) for array in self))

    def __call__(self, point_G2: np.ndarray) -> np.ndarray:
        """One point of each tile."""
        point_G2 = self.size_G2 * point_G2 + self.origin_G2
        np.maximum(point_G2, self.least_G1, out=point_G2)
        return np.asarray(np.minimum(point_G2, self.most_G2, out=point_G2))


def ranges(begin_G: np.ndarray, count_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """begin, begin + 1, ... of every range one after the other, and the number of the range each belongs to."""
    owner = np.repeat(np.arange(len(count_G)), count_G)
    return np.arange(len(owner)) + (begin_G - offsets(count_G)[:-1])[owner], owner


def offsets(count_G: np.ndarray) -> np.ndarray:
    """Where each range begins if they lie one after the other, and where the last one ends, int64 [G + 1]."""
    return np.concatenate(([0], np.cumsum(count_G, dtype=np.int64)))


# Labels as the loss wants them: normalised centre and size, with the number of their image in the batch.
#
# Dimension key:  T targets   M samples


def to_targets(
    sample_T: np.ndarray, label_T5: np.ndarray, out_wh: tuple[int, int], flip_M2: np.ndarray, *, first_row: int
) -> np.ndarray:
    """Number of the image, class, normalised centre and size, flipped; float32 [T, 6].

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
