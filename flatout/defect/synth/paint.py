"""Paint drawn defects into one patch: a kernel's box at a time, clipped to the patch, saturated after each.

Order matters where defects overlap: 240 + 80 - 60 is 195, 240 - 60 + 80 is 255. A kernel is never rescaled at an edge.

Dimension key:  C planes   H W patch   h w window   K defects   S side of a kernel's square
"""

from collections.abc import Mapping
from typing import NamedTuple

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
    num = int(sample["num"])
    number_K, amplitude_KC = sample["kernel"][:num], sample["amplitude"][:num]
    if full_swing:
        amplitude_KC = np.abs(amplitude_KC)
    added_KCSS = kernels.value_QSS[number_K][:, None] * amplitude_KC[:, :, None, None]
    # As Python's own numbers: looking single values up in arrays costs more than painting them.
    facts = zip(
        sample["center"][:num].tolist(), number_K.tolist(), sample["labelled"][:num].tolist(),
        (amplitude_KC[:, 0] > 0).tolist(), strict=True,
    )  # fmt: skip
    for added_CSS, ((x, y), number, labelled, rises) in zip(added_KCSS, facts, strict=True):
        inside = _inside(x, y, kernels.reach, mask_HW.shape)
        if inside is None:
            continue
        window_Chw, part = patch_CHW[:, inside.rows, inside.columns], inside.part
        before_hw = window_Chw[0].copy() if full_swing else None
        if full_swing and patch_CHW[0, y, x] > MIDDLE:
            added_CSS, rises = -added_CSS, False
        np.add(window_Chw, added_CSS if part is None else added_CSS[:, *part], out=window_Chw)
        # All planes go the same way, so one end is enough; and np.clip takes three times as long for so few pixels.
        if rises:
            np.minimum(window_Chw, TOP, out=window_Chw)
        else:
            np.maximum(window_Chw, 0, out=window_Chw)
        if labelled:
            marks_hw = mask_HW[inside.rows, inside.columns]
            label_SS = kernels.label_QSS[number]
            changed_hw = label_SS if part is None else label_SS[part]
            if before_hw is not None:
                changed_hw = np.abs(window_Chw[0] - before_hw) > VISIBLE
            np.logical_or(marks_hw, changed_hw, out=marks_hw)


class Inside(NamedTuple):
    """What of a kernel's square lies in the patch."""

    rows: slice
    columns: slice
    part: tuple[slice, slice] | None
    """Of the square; None: all of it, as nearly always."""


def _inside(x: int, y: int, reach: int, shape_hw: tuple[int, ...]) -> Inside | None:
    top, bottom, left, right = y - reach, y + reach + 1, x - reach, x + reach + 1
    height, width = shape_hw
    if top >= 0 and left >= 0 and bottom <= height and right <= width:
        return Inside(slice(top, bottom), slice(left, right), None)
    rows, columns = slice(max(top, 0), min(bottom, height)), slice(max(left, 0), min(right, width))
    if rows.stop <= rows.start or columns.stop <= columns.start:
        return None
    part = slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left)
    return Inside(rows, columns, part)
