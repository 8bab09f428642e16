"""Labels through the warp: new boxes, and which of them are worth keeping.

Dimension key:  Q sheets   T labels   P polygon points
"""

from typing import NamedTuple

import numpy as np

from flatout.yolo.augment.labels import CanvasLabels, ranges, warped_boxes
from flatout.yolo.augment.layout import Sheets
from flatout.yolo.augment.polygons import warped_rows
from flatout.yolo.augment.polygons_compiled import boxes_of_polygons

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
