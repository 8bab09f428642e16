"""Paint drawn defects into one patch: a kernel's box at a time, clipped to the patch, saturated after each.

Order matters where defects overlap: 240 + 80 - 60 is 195, 240 - 60 + 80 is 255. A kernel is never rescaled at an edge.

Dimension key:  C planes   H W patch   K defects
"""

from collections.abc import Mapping

import numpy as np

from flatout.defect.strips.canonical import TOP
from flatout.defect.synth.kernels import Kernels

MIDDLE = 127.5
VISIBLE = 100.0
"""Grey levels that a full-swing defect must change a pixel of target by to be labelled there."""


def paint(
    patch_CHW: np.ndarray, mask_HW: np.ndarray, sample: Mapping[str, np.ndarray], kernels: Kernels, *, full_swing: bool
) -> None:
    """Paint the first `num` defects of `sample` (see `draw`) in place, in order, and mark the labelled ones.

    float32, 0..255. With `full_swing`, a defect gets the sign that is visible on what lies under its centre, and the
    label is what it really changes in target.
    """
    height, width = mask_HW.shape
    for place in range(int(sample["num"])):
        number = sample["kernel"][place]
        values = kernels.values[number]
        x, y = sample["center"][place]
        top, left = y - values.shape[0] // 2, x - values.shape[1] // 2
        rows = slice(max(top, 0), min(top + values.shape[0], height))
        columns = slice(max(left, 0), min(left + values.shape[1], width))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            continue
        part = slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left)
        window_Chw = patch_CHW[:, rows, columns]
        amplitude_C = sample["amplitude"][place]
        if full_swing:
            amplitude_C = np.abs(amplitude_C) * (-1 if patch_CHW[0, y, x] > MIDDLE else 1)
        before_hw = window_Chw[0].copy() if full_swing else None
        window_Chw += values[part] * amplitude_C[:, None, None]
        np.clip(window_Chw, 0, TOP, out=window_Chw)
        if sample["labelled"][place]:
            changed = kernels.labels[number][part] if before_hw is None else abs(window_Chw[0] - before_hw) > VISIBLE
            mask_HW[rows, columns] |= changed
