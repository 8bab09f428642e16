"""Images stored as 4:2:0, in half of the bytes: brightness of every pixel, colour of every second one both ways.

Full-range YCbCr, as in JPEG. An image of even height h and width w is one array uint8 [h * 3 / 2, w, 1]: h rows of
brightness, then h / 2 rows in which the blue and the red difference alternate. Odd sides repeat their last row or
column. So a pixel's colour lies at row h + y // 2, columns x - x % 2 and the one after it. Renderers convert it back to
BGR in integers, all to the same bits; bench/augment_chroma.py measures how far these are from the original image.

Dimension key:  N images   H W rows and columns of pixels   h w half as many
"""

import numpy as np

from flatout.feed import Arrays
from flatout.yolo.augment.samples import SizeCheckedImages

SHIFT = 14
HALF = 1 << (SHIFT - 1)
Y_BY_BLUE, Y_BY_GREEN, Y_BY_RED, CB_BY_BLUE, CR_BY_RED = 1868, 9617, 4899, 9241, 11682
"""Weights in units of 1 / 2 ** SHIFT, as in OpenCV's BGR2YCrCb; the differences are those to the brightness."""
RED_BY_CR, GREEN_BY_CR, GREEN_BY_CB, BLUE_BY_CB = 22987, -11698, -5636, 29049
"""Weights of the conversion back to BGR."""
BAND_PIXELS = 1 << 15
"""Pixels that are converted at a time, so that they stay in a core's cache."""


class Subsampled(SizeCheckedImages):
    """Images uint8 [h, w, 3], BGR, of known sizes, as 4:2:0; converted on access."""

    dtype = np.dtype(np.uint8)

    def __init__(self, images: Arrays, wh_N2: np.ndarray) -> None:
        super().__init__(images, wh_N2)
        self.shapes_ND = kept_shapes(wh_N2)

    def __getitem__(self, index: int) -> np.ndarray:
        return subsample(super().__getitem__(index))


def kept_shapes(wh_N2: np.ndarray) -> np.ndarray:
    """Shapes of the arrays that store images of these widths and heights, int64 [N, 3]."""
    width_N, height_N = (wh_N2 + wh_N2 % 2).astype(np.int64).T
    return np.stack((height_N * 3 // 2, width_N, np.ones_like(width_N)), 1)


def subsample(image: np.ndarray) -> np.ndarray:
    """Convert uint8 [h, w, 3], BGR, to uint8 [h * 3 / 2, w, 1], with h and w rounded up to even."""
    if image.shape[0] % 2 or image.shape[1] % 2:
        image = np.pad(image, ((0, image.shape[0] % 2), (0, image.shape[1] % 2), (0, 0)), "edge")
    height, width = image.shape[:2]
    kept = np.empty((height * 3 // 2, width, 1), np.uint8)
    band_rows = max(2, BAND_PIXELS // width // 2 * 2)
    for top in range(0, height, band_rows):
        rows_HW3 = image[top : top + band_rows]
        _subsample_rows(rows_HW3, kept[top : top + len(rows_HW3), :, 0], kept[height + top // 2 :, :, 0])
    return kept


def _subsample_rows(image_HW3: np.ndarray, brightness_HW: np.ndarray, colour_hW: np.ndarray) -> None:
    """Convert an even number of rows into their brightness and colour rows."""
    # int32 planes, changed in place: sums over axes and new arrays would take most of the time.
    plane_3HW = np.empty((3, *image_HW3.shape[:2]), np.int32)
    plane_3HW[:] = image_HW3.transpose(2, 0, 1)
    brightness_HW[:] = _brightness(plane_3HW)
    # The colour differences of the mean of four pixels are the means of their differences.
    pair_3hW = plane_3HW[:, ::2] + plane_3HW[:, 1::2]
    mean_3hw = pair_3hW[..., ::2] + pair_3hW[..., 1::2]
    mean_3hw += 2
    mean_3hw >>= 2
    y_hw = _brightness(mean_3hw)
    for column, (channel, weight) in enumerate(((0, CB_BY_BLUE), (2, CR_BY_RED))):
        difference_hw = mean_3hw[channel] - y_hw
        difference_hw *= weight
        difference_hw += HALF + (128 << SHIFT)
        difference_hw >>= SHIFT
        colour_hW[: len(y_hw), column::2] = difference_hw.clip(0, 255)


def _brightness(bgr_3HW: np.ndarray) -> np.ndarray:
    """Brightness from 0 to 255, int32."""
    sum_HW = bgr_3HW[0] * Y_BY_BLUE
    part_HW = bgr_3HW[1] * Y_BY_GREEN
    sum_HW += part_HW
    sum_HW += np.multiply(bgr_3HW[2], Y_BY_RED, out=part_HW)
    sum_HW += HALF
    sum_HW >>= SHIFT
    return np.asarray(sum_HW)
