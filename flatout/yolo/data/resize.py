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


def resize_part(part_HWC: np.ndarray, native_hw: tuple[int, int], img_size: int) -> np.ndarray:
    """As `resize_long_side` for training, bilinear, of a JPEG of `native_hw` that was decoded at a half or less.

    A decoded pixel stands for 2, 4 or 8 of the file. Where a side is no multiple of that, the last one reaches beyond
    the picture: a plain resize would squeeze everything by up to a pixel, and boxes would not fit.
    """
    import cv2

    num_per_pixel = round(max(native_hw) / max(part_HWC.shape[:2]))
    height, width = kept_size_hw(native_hw, img_size)
    if native_hw == (part_HWC.shape[0] * num_per_pixel, part_HWC.shape[1] * num_per_pixel):
        is_done = part_HWC.shape[:2] == (height, width)
        return part_HWC if is_done else np.asarray(cv2.resize(part_HWC, (width, height)))
    scale_y, scale_x = native_hw[0] / height / num_per_pixel, native_hw[1] / width / num_per_pixel
    to_part = np.array([[scale_x, 0, (scale_x - 1) / 2], [0, scale_y, (scale_y - 1) / 2]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(part_HWC, to_part, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)
