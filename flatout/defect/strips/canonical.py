"""The one form in which all later code sees an image: float32, 0 to 255, planes target, ref1, ref2.

Done once per image, when it is decoded: per patch it would cost more than the patch itself.

Dimension key:  C planes (target, ref1, ref2)   H W pixels
"""

import numpy as np

from flatout.feed.source import DecodeError

PLANES = 3
TOP = 255.0
MIDDLE = 127.5
_STORED = (PLANES, PLANES + 1)
"""Planes a file may have; the fourth is a production mask and is dropped."""
_PLANES_FIRST_ABOVE = 4
"""An array whose other sides are larger than this and whose first is 3 or 4 has its planes first."""


def canonical(stored: np.ndarray) -> np.ndarray:
    """Any stored layout and range -> float32 [C, H, W] in 0..255, contiguous and new; DecodeError if it is no image.

    Values outside of 0..255 anywhere in the three planes stretch all of them together; others stay as they are.
    """
    with np.errstate(over="ignore"):  # told below
        planes_CHW = np.ascontiguousarray(planes_first(stored), dtype=np.float32)
    if planes_CHW.base is stored or planes_CHW is stored:
        planes_CHW = planes_CHW.copy()
    low, high = float(planes_CHW.min()), float(planes_CHW.max())
    # A sum would overflow on large finite values; extremes of an image with NaN are NaN.
    if not np.isfinite(low) or not np.isfinite(high):
        raise DecodeError("it has values that are not finite. Mend the file, or leave it out.")
    if low < 0 or high > TOP:
        _stretch(planes_CHW, low, high)
    return planes_CHW


def _stretch(planes_CHW: np.ndarray, low: float, high: float) -> None:
    if high <= low:
        planes_CHW.fill(0)
        return
    planes_CHW -= np.float32(low)
    planes_CHW /= np.float32(high - low)
    planes_CHW *= np.float32(TOP)


def planes_first(stored: np.ndarray) -> np.ndarray:
    """The first three planes [C, H, W], before anything looks at their values; DecodeError if there are none."""
    if stored.ndim != 3 or stored.dtype.kind not in "uif" or stored.size == 0:
        raise DecodeError(
            f"it holds {stored.dtype} of shape {stored.shape}. Wanted are the three planes target, ref1 and ref2 "
            "as numbers, in the first or in the last axis."
        )
    first, *sides = stored.shape
    if first in _STORED and min(sides) > _PLANES_FIRST_ABOVE:
        return stored[:PLANES]
    if stored.shape[2] in _STORED:
        return stored[:, :, :PLANES].transpose(2, 0, 1)
    raise DecodeError(f"it has shape {stored.shape}, which has no axis of 3 or 4 planes (target, ref1, ref2).")
