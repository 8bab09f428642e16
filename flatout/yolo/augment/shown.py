"""Samples that are shown as they are, letterboxed: where they lie, their targets and shapes. Validation on any device.

Dimension key:  M samples   N pictures
"""

import numpy as np

from flatout.feed.source import Out
from flatout.yolo.augment.canvas_labels import gather_labels
from flatout.yolo.augment.draw import undrawn
from flatout.yolo.augment.layout import Sheets, lay_out
from flatout.yolo.augment.targets import to_targets
from flatout.yolo.data.image_set import ImageSet


def write_shown(
    image_set: ImageSet, wh_N2: np.ndarray, indices_M: np.ndarray, out_wh: tuple[int, int], out: Out
) -> Sheets:
    """Write targets and shapes of M samples, and return where their pixels go; no label is clipped or left out."""
    draws = undrawn(indices_M)
    sheets = lay_out(draws, wh_N2, size=max(out_wh), out_wh=out_wh, enlarge=False)
    labels = gather_labels(image_set.labels, sheets)
    label_T5 = np.concatenate((labels.class_T[:, None], labels.box_T4), axis=1)
    targets_T6 = to_targets(labels.sheet_T, label_T5, out_wh, draws["flip"], first_row=out.first_row)
    out["targets"].put_all(targets_T6, np.bincount(labels.sheet_T, minlength=len(indices_M)))
    out["shapes"][:] = shape_rows(image_set.size_wh_N2[indices_M], wh_N2[indices_M], sheets.label_origin_Q92[:, 0])
    return sheets


def shape_rows(native_wh_M2: np.ndarray, wh_M2: np.ndarray, pad_M2: np.ndarray) -> np.ndarray:
    """h0, w0, h / h0, w / w0, padding x, padding y; float64 [M, 6]."""
    return np.concatenate((native_wh_M2[:, ::-1], (wh_M2 / native_wh_M2)[:, ::-1], pad_M2), axis=1)
