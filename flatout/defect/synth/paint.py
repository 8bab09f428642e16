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
    facts = zip(sample["center"][:num].tolist(), number_K.tolist(), sample["labelled"][:num].tolist(), strict=True)
    for added_CSS, ((x, y), number, labelled) in zip(added_KCSS, facts, strict=True):
        rows, columns = _covered(y, kernels.reach, mask_HW.shape[0]), _covered(x, kernels.reach, mask_HW.shape[1])
        if rows.image.stop <= rows.image.start or columns.image.stop <= columns.image.start:
            continue
        window_Chw = patch_CHW[:, rows.image, columns.image]
        before_hw = window_Chw[0].copy() if full_swing else None
        if full_swing and patch_CHW[0, y, x] > MIDDLE:
            added_CSS = -added_CSS
        window_Chw += added_CSS[:, rows.kernel, columns.kernel]
        # Two plain passes are three times as fast as np.clip on so few pixels.
        np.minimum(window_Chw, TOP, out=window_Chw)
        np.maximum(window_Chw, 0, out=window_Chw)
        if not labelled:
            continue
        if before_hw is None:
            mask_HW[rows.image, columns.image] |= kernels.label_QSS[number][rows.kernel, columns.kernel]
        else:
            mask_HW[rows.image, columns.image] |= np.abs(window_Chw[0] - before_hw) > VISIBLE


class Covered(NamedTuple):
    """What a square covers along one axis of the patch, and which part of the square that is."""

    image: slice
    kernel: slice


def _covered(center: int, reach: int, length: int) -> Covered:
    first, last = center - reach, center + reach + 1
    if first >= 0 and last <= length:
        return Covered(slice(first, last), _ALL)
    begin, end = max(first, 0), min(last, length)
    return Covered(slice(begin, end), slice(begin - first, end - first))


_ALL = slice(None)
