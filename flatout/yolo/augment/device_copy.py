"""Objects copied on the device: mirrored within their mosaic, along the polygons that `copy_paste` chooses.

The mosaic itself is never made there. What is copied is a mask of its canvas, one byte per pixel, and a renderer that
looks up a canvas pixel takes the mirrored one where the mask says so.

Dimension key:  M samples   Q sheets   K objects   P points   J masks, one per sheet with copies   B samples of a batch
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flatout.feed.source import Fields, Out, Rows
from flatout.yolo.augment.layout import Sheets

SPAN_COLUMNS = 7
"""Of an object: mask, first point, number of points, box of its pixels x1, y1, x2, y2, both ends included."""


class CopyPlan(NamedTuple):
    """The copies of a batch, on the host."""

    span_K7: np.ndarray
    """int32, SPAN_COLUMNS."""
    mask_of_B2: np.ndarray
    """int32: number of the mask of each sheet, -1 where nothing is copied."""
    num_masks: int


def copy_fields(share: float) -> Fields:
    """Objects of a sample (sheet 0 or 1, number of points, box of its pixels), and their points on the canvas."""
    return {
        "copied": Rows(6, np.int32, expected=1 + 8 * share),
        "copy_points": Rows(2, np.int32, expected=16 + 300 * share),
    }


def write_copies(sheets: Sheets, copied: Sequence[Sequence[np.ndarray]], num_samples: int, out: Out) -> None:
    """The polygons of every sheet, in canvas pixels, into the fields of `copy_fields`."""
    rows: list[list[int]] = []
    points = [np.zeros((0, 2), np.int32)]
    num_objects_M, num_points_M = np.zeros((2, num_samples), np.int64)
    is_second_Q = np.concatenate(([False], sheets.sample_Q[1:] == sheets.sample_Q[:-1])).astype(int).tolist()
    for q, (sample, slot) in enumerate(zip(sheets.sample_Q.tolist(), is_second_Q, strict=True)):
        most = sheets.canvas_Q2[q] - 1
        for polygon in copied[q]:
            whole = polygon.astype(np.int32)
            low, high = whole.min(0), np.minimum(whole.max(0), most)
            rows.append([slot, len(whole), *low.tolist(), *high.tolist()])
            points.append(whole)
            num_objects_M[sample] += 1
            num_points_M[sample] += len(whole)
    out["copied"].put_all(np.array(rows, np.int32).reshape(-1, 6), num_objects_M)
    out["copy_points"].put_all(np.concatenate(points), num_points_M)


def plan_copies(copied_K6: np.ndarray, count_B: np.ndarray) -> CopyPlan:
    """Of a whole batch, whose samples have `count_B` objects each."""
    sample_K = np.repeat(np.arange(len(count_B)), count_B)
    slot_K, num_points_K = copied_K6[:, 0], copied_K6[:, 1]
    sheets, mask_K = np.unique(2 * sample_K + slot_K, return_inverse=True)
    mask_of_B2 = np.full(2 * len(count_B), -1, np.int32)
    mask_of_B2[sheets] = np.arange(len(sheets))
    first_point_K = np.cumsum(num_points_K) - num_points_K
    span_K7 = np.column_stack((mask_K, first_point_K, num_points_K, copied_K6[:, 2:])).astype(np.int32)
    return CopyPlan(span_K7, mask_of_B2.reshape(-1, 2), len(sheets))
