"""From counts to what the network sees, on the device: a quarter of the bytes travel, and the CPU does not compute.

Dimension key:  N clips   L frames   C channels   H W spike picture
"""

from typing import Literal

import torch
from torch import Tensor

VoxelNorm = Literal["none", "rate", "log1p", "meanstd"]
LEAST_STD = 1e-12
LEAST_RATE = 1e-6


class Normalise:
    """Counts to float32, in the way the config names."""

    def __init__(self, kind: VoxelNorm = "none", *, mean: float = 0.0, std: float = 1.0, scale: float = 1.0) -> None:
        """`scale` multiplies counts first: 1 / 255 for textures, which are no counts."""
        if kind not in ("none", "rate", "log1p", "meanstd"):
            raise ValueError(f"VOXEL_NORM={kind!r} is unknown: use none, rate, log1p or meanstd.")
        self._kind, self._mean, self._std, self._scale = kind, mean, max(std, LEAST_STD), scale

    def __call__(self, counts_NLCHW: Tensor, frames_NLC: Tensor) -> Tensor:
        """`frames_NLC`: spike frames behind each channel; a channel with none is 0 as a rate."""
        values = counts_NLCHW.float() * self._scale
        if self._kind == "rate":
            return values / frames_NLC.clamp(min=1)[..., None, None]
        if self._kind == "log1p":
            return torch.log1p(values)
        if self._kind == "meanstd":
            return (values - self._mean) / self._std
        return values


def gained(rates_NLCHW: Tensor, blur_NL3HW: Tensor) -> Tensor:
    """Rates times mean brightness / mean rate of the clip: independent of the camera's threshold."""
    brightness = blur_NL3HW.float().mean(dim=(1, 2, 3, 4))
    rate = rates_NLCHW.mean(dim=(1, 2, 3, 4)).clamp(min=LEAST_RATE)
    return rates_NLCHW * (brightness / rate)[:, None, None, None, None]
