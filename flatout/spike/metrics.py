"""How good is a deblurred frame? PSNR and SSIM as papers compute them, and as the early code did under its own name.

Dimension key:  N frames (or clips)   H W frame
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW, SIGMA = 11, 1.5
C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
BEST_PSNR = 99.0
"""What the early code says of equal pictures."""


class Scores(NamedTuple):
    """Of each frame, float64 [N]."""

    psnr: Tensor
    ssim: Tensor


def standard_scores(predicted_N3HW: Tensor, target_N3HW: Tensor) -> Scores:
    """Both as 8-bit pictures: values in 0..1 are clamped and rounded first."""
    predicted, target = (_as_bytes(each) for each in (predicted_N3HW, target_N3HW))
    return Scores(psnr_of_bytes(predicted, target), ssim_of_bytes(predicted, target))


def psnr_of_bytes(predicted_N3HW: Tensor, target_N3HW: Tensor) -> Tensor:
    """Per frame over all three channels, of values 0..255."""
    mse_N = (predicted_N3HW - target_N3HW).square().mean(dim=(1, 2, 3))
    return 10 * torch.log10(255.0**2 / mse_N)


def ssim_of_bytes(predicted_N3HW: Tensor, target_N3HW: Tensor) -> Tensor:
    """Per frame, mean over channels and the region where the Gaussian window fits, of values 0..255."""
    kernel = _gaussian(predicted_N3HW)

    def blurred(x: Tensor) -> Tensor:
        # Two passes of a line instead of one of a square: the same sums.
        rows = F.conv2d(x, kernel.view(1, 1, -1, 1).expand(3, 1, -1, 1), groups=3)
        return F.conv2d(rows, kernel.view(1, 1, 1, -1).expand(3, 1, 1, -1), groups=3)

    a, b = predicted_N3HW, target_N3HW
    mean_a, mean_b = blurred(a), blurred(b)
    var_a, var_b = blurred(a * a) - mean_a**2, blurred(b * b) - mean_b**2
    cov = blurred(a * b) - mean_a * mean_b
    ssim = ((2 * mean_a * mean_b + C1) * (2 * cov + C2)) / ((mean_a**2 + mean_b**2 + C1) * (var_a + var_b + C2))
    return ssim.mean(dim=(1, 2, 3))


def ref_psnr(predicted: Tensor, target: Tensor) -> Tensor:
    """Of a whole tensor with values in 0..1, clamped, as the early code has it."""
    mse = (predicted.clamp(0, 1) - target.clamp(0, 1)).square().mean()
    return torch.where(mse <= 1e-10, torch.full_like(mse, BEST_PSNR), 10 * torch.log10(1 / mse))


def ref_luma(rgb_N3HW: Tensor) -> Tensor:
    """Y of values in 0..1, [N, 1, H, W]."""
    weights = torch.tensor([0.257, 0.504, 0.098], dtype=rgb_N3HW.dtype, device=rgb_N3HW.device)
    return (rgb_N3HW.clamp(0, 1) * weights.view(1, 3, 1, 1)).sum(1, keepdim=True) + 16 / 255


def ref_ssim_y(predicted_N3HW: Tensor, target_N3HW: Tensor) -> Tensor:
    """Uniform window over Y with zero padding, mean over everything: not comparable with papers."""
    a, b = ref_luma(predicted_N3HW), ref_luma(target_N3HW)

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, WINDOW, 1, WINDOW // 2, count_include_pad=True)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    cov = mean(a * b) - mean_a * mean_b
    above = (2 * mean_a * mean_b + 1e-4) * (2 * cov + 9e-4)
    below = (mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4)
    return (above / (below + 1e-12)).mean()


def _as_bytes(values: Tensor) -> Tensor:
    return (values.clamp(0, 1) * 255).round().double()


def _gaussian(like: Tensor) -> Tensor:
    x = torch.arange(WINDOW, dtype=like.dtype, device=like.device) - WINDOW // 2
    weights = torch.exp(-(x**2) / (2 * SIGMA**2))
    return weights / weights.sum()
