"""Subsampled pixels back to BGR, in torch; the renderers' kernels do the same in registers."""

import torch
from torch import Tensor

from flatout.yolo.augment.chroma import BLUE_BY_CB, GREEN_BY_CB, GREEN_BY_CR, HALF, RED_BY_CR, SHIFT


def to_bgr(y: Tensor, cb: Tensor, cr: Tensor) -> Tensor:
    """Brightness and colour differences of pixels, of any shape, as int32 [..., 3], 0 to 255."""
    y, cb, cr = y.int(), cb.int() - 128, cr.int() - 128
    blue = y + ((BLUE_BY_CB * cb + HALF) >> SHIFT)
    green = y + ((GREEN_BY_CB * cb + GREEN_BY_CR * cr + HALF) >> SHIFT)
    red = y + ((RED_BY_CR * cr + HALF) >> SHIFT)
    return torch.stack((blue, green, red), -1).clamp(0, 255)


def fetch_bgr(data: Tensor, at: Tensor, colour_at: Tensor) -> Tensor:
    """Pixels of which brightness lies at `at` and colour at `colour_at`, int32 [..., 3]."""
    return to_bgr(data[at], data[colour_at], data[colour_at + 1])
