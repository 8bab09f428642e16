"""Labels on the canvases of sheets: gathered from the data set for a whole micro-batch, in pixels.

Dimension key:  Q sheets   T labels   P polygon points   G ranges
"""

from typing import NamedTuple

import numpy as np

from flatout.yolo.augment.draw import PLAIN
from flatout.yolo.augment.layout import Sheets
from flatout.yolo.data.image_set import Labels


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

    @property
    def num_points_T(self) -> np.ndarray:
        return np.diff(self.first_point_T)

    def polygon(self, label: int) -> np.ndarray:
        return self.point_P2[self.first_point_T[label] : self.first_point_T[label + 1]]


def gather_labels(labels: Labels, sheets: Sheets) -> CanvasLabels:
    """The labels of every tile, in the order of sheets and tiles; those of mosaics are clipped to their canvas."""
    sheet_G, tile_G = np.nonzero(sheets.picture_Q9 >= 0)
    picture_G = sheets.picture_Q9[sheet_G, tile_G]
    begin_G, count_G = labels.first_N[picture_G], np.diff(labels.first_N)[picture_G]
    label_T, place_T = ranges(begin_G, count_G)
    sheet_T, tile_T = sheet_G[place_T], tile_G[place_T]
    class_box_T5 = labels.class_box_T5[label_T]
    # float32 from here on, as in YOLOv7, so that boxes near a limit of the candidate filter fall on the same side.
    size_T2 = sheets.label_size_Q92[sheet_T, tile_T].astype(np.float32)
    origin_T2 = sheets.label_origin_Q92[sheet_T, tile_T].astype(np.float32)
    centre_T2, half_T2 = class_box_T5[:, 1:3], class_box_T5[:, 3:5] / 2
    box_T4 = np.concatenate(
        (size_T2 * (centre_T2 - half_T2) + origin_T2, size_T2 * (centre_T2 + half_T2) + origin_T2), axis=1
    )
    is_mosaic_Q = sheets.kind_Q != PLAIN
    num_points_T = np.where(is_mosaic_Q[sheet_T], np.diff(labels.first_point_T)[label_T], 0)
    point_P, owner_P = ranges(labels.first_point_T[label_T], num_points_T)
    point_P2 = labels.point_P2[point_P] * size_T2[owner_P] + origin_T2[owner_P]
    limit_T2 = sheets.canvas_Q2[sheet_T].astype(np.float32)
    clipped_T4 = np.minimum(np.maximum(box_T4, 0), np.tile(limit_T2, 2))
    return CanvasLabels(
        sheet_T,
        class_box_T5[:, 0],
        np.where(is_mosaic_Q[sheet_T, None], clipped_T4, box_T4),
        np.minimum(np.maximum(point_P2, 0), limit_T2[owner_P]),
        offsets(num_points_T),
    )


def ranges(begin_G: np.ndarray, count_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """begin, begin + 1, ... of every range one after the other, and the number of the range each belongs to."""
    owner = np.repeat(np.arange(len(count_G)), count_G)
    return np.arange(len(owner)) + (begin_G - offsets(count_G)[:-1])[owner], owner


def offsets(count_G: np.ndarray) -> np.ndarray:
    """Where each range begins if they lie one after the other, and where the last one ends, int64 [G + 1]."""
    return np.concatenate(([0], np.cumsum(count_G, dtype=np.int64)))
