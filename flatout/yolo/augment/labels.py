"""Labels on the canvases of sheets: gathered from the data set for a whole micro-batch, in pixels.

Dimension key:  Q sheets   T labels   P polygon points   G ranges, or places: tiles that show a picture
"""

from typing import NamedTuple

import numpy as np

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
