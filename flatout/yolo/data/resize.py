"""The size at which a picture is kept: its long side made equal to the training size, as YOLOv7 does it."""

from typing import NamedTuple

import numpy as np


class Resized(NamedTuple):
    """A picture at training size, and its sizes before and after, height first."""

    image: np.ndarray
    """uint8 [H, W, 3], BGR; the given array itself where nothing had to be done."""
    native_hw: tuple[int, int]
    hw: tuple[int, int]


def kept_size_hw(native_hw: tuple[int, int], img_size: int) -> tuple[int, int]:
    """Size after the resize. Truncated double precision: the long side is sometimes img_size - 1 (pinned by golden
    yolov7-data/load_image.npz)."""
    ratio = img_size / max(native_hw)
    if ratio == 1:
        return native_hw
    return int(native_hw[0] * ratio), int(native_hw[1] * ratio)


def resize_long_side(image_HWC: np.ndarray, img_size: int, *, augment: bool) -> Resized:
    """Area interpolation where a picture shrinks and is not augmented, else bilinear; small ones are enlarged too."""
    import cv2

    native_hw = image_HWC.shape[0], image_HWC.shape[1]
    height, width = kept_size_hw(native_hw, img_size)
    # By the ratio, not by the size: a ratio just off 1 resizes to the same size, which leaves every pixel as it is.
    if max(native_hw) != img_size:
        shrinks = img_size < max(native_hw)
        how = cv2.INTER_AREA if shrinks and not augment else cv2.INTER_LINEAR
        # A line of pixels would shrink to nothing, which no picture survives.
        image_HWC = cv2.resize(image_HWC, (max(width, 1), max(height, 1)), interpolation=how)
    return Resized(image_HWC, native_hw, (image_HWC.shape[0], image_HWC.shape[1]))
