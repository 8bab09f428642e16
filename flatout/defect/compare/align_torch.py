"""The registration of `align` in torch: for batches, on any device, without a host-device wait.

Constants are copied to a device once, and nothing is a convolution, which cuDNN would round to TF32. Shifts agree with
those of `align` to 0.05 px where the images determine them: OpenCV rounds the positions at which it interpolates to a
thirty-second of a pixel, torch does not.

Dimension key:  B images   H W image   h w half or quarter of it   G K blocks, rows and columns   S whole shifts
                N values of a block, or pixels from which tones are taken   2 (x, y)
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.defect.compare import align as host
from flatout.defect.compare.align import AlignConfig
from flatout.defect.compare.classical_torch import order_statistic

SHIFTS_AT_ONCE = 16
"""Whole shifts that are tried by one kernel: their differences are in memory together."""


class AlignedBatch(NamedTuple):
    """As `flatout.defect.compare.align.Alignment`, for a batch; tensors on the device of the images."""

    reference_BHW: Tensor
    inside_BHW: Tensor
    shift_BGK2: Tensor
    confidence_BGK: Tensor


def align_batch(target_BHW: Tensor, reference_BHW: Tensor, config: AlignConfig | None = None) -> AlignedBatch:
    """Align references to targets, both float32 in 0..255 and of one size."""
    config = config or AlignConfig()
    height, width = target_BHW.shape[1:]
    padding = (0, -width % config.block_px, 0, -height % config.block_px)
    target, reference = (F.pad(planes[:, None], padding, mode="replicate") for planes in (target_BHW, reference_BHW))
    target2, reference2 = (F.avg_pool2d(planes, host.FINE) for planes in (target, reference))
    target4, reference4 = (F.avg_pool2d(planes, host.COARSE // host.FINE) for planes in (target2, reference2))
    contrast = _spread(target4)
    own = _spread(reference4)
    gain = torch.where(own > 0, contrast / own.clamp(min=1e-12), 1.0)
    offset = target4.mean((1, 2, 3), keepdim=True) - gain * reference4.mean((1, 2, 3), keepdim=True)
    coarse_BGK2 = _coarse_shifts(target4[:, 0], (reference4 * gain + offset)[:, 0], config)
    equations = _Equations(target2, config.block_px // host.FINE, contrast)
    reference2 = reference2 * gain + offset
    shift_BGK2, unexplained_BGK = coarse_BGK2, torch.zeros_like(coarse_BGK2[..., 0])
    for number in range(config.iterations):
        moved, inside = _moved(reference2, _dense(shift_BGK2 / host.FINE, target2.shape[2:]))
        box_px = host.LAST_BOX if number == config.iterations - 1 else host.FIRST_BOX
        shift_BGK2, unexplained_BGK = equations.solve(shift_BGK2, moved, inside[:, None], box_px=box_px)
        refined = (shift_BGK2 - coarse_BGK2).clamp(-host.MAX_REFINED_PX, host.MAX_REFINED_PX)
        shift_BGK2 = coarse_BGK2 + refined
    dense_BHW2 = _dense(shift_BGK2, target.shape[2:])[:, :height, :width]
    moved, inside_BHW = _moved(reference_BHW[:, None], dense_BHW2)
    gain_B, offset_B = _tone_changes(target_BHW, moved[:, 0], inside_BHW)
    toned_BHW = (moved[:, 0] * gain_B[:, None, None] + offset_B[:, None, None]).clamp(0, 255)
    aligned_BHW = torch.where(inside_BHW, toned_BHW, target_BHW)
    return AlignedBatch(aligned_BHW, inside_BHW, shift_BGK2, equations.confidence(unexplained_BGK))


def _tone_changes(target_BHW: Tensor, moved_BHW: Tensor, inside_BHW: Tensor) -> tuple[Tensor, Tensor]:
    """Gains and offsets of `flatout.defect.compare.align.tone_change`, float32 [B]; values are rounded to bytes."""
    step = host.TONE_STRIDE
    inside_BN = inside_BHW[:, ::step, ::step].flatten(1)
    target_BN, moved_BN = (
        planes_BHW[:, ::step, ::step].flatten(1).round().clamp(0, 255).to(torch.uint8)
        for planes_BHW in (target_BHW, moved_BHW)
    )
    num_B = inside_BN.sum(1)
    # Several order statistics at once: each takes a few dozen small kernels.
    ranks = torch.cat([((num_B - 1) * share).long() for share in (host.DARK, host.BRIGHT)])
    ends = order_statistic(moved_BN.repeat(2, 1), ranks, inside_BN.repeat(2, 1)).chunk(2)
    is_bright_BN = 2 * moved_BN.to(torch.int16) > (ends[0] + ends[1])[:, None]
    dark_BN, bright_BN = inside_BN & ~is_bright_BN, inside_BN & is_bright_BN
    among = torch.cat((dark_BN, bright_BN)).repeat(2, 1)
    middles = (among.sum(1) - 1).div(2, rounding_mode="floor")
    values = torch.cat((moved_BN, moved_BN, target_BN, target_BN))
    dark, bright, wanted_dark, wanted_bright = order_statistic(values, middles, among).float().chunk(4)
    share = bright_BN.sum(1) / num_B.clamp(min=1)
    contrast = bright - dark
    gain = (wanted_bright - wanted_dark) / contrast.clamp(min=host.MIN_TONE_CONTRAST)
    changes = (
        (share >= host.MIN_TONE_SHARE)
        & (share <= 1 - host.MIN_TONE_SHARE)
        & (contrast >= host.MIN_TONE_CONTRAST)
        & (torch.maximum((wanted_dark - dark).abs(), (wanted_bright - bright).abs()) > host.TONE_DIFFERENCE * contrast)
        & (gain >= 1 / host.MAX_GAIN)
        & (gain <= host.MAX_GAIN)
    )
    return torch.where(changes, gain, 1.0), torch.where(changes, wanted_dark - gain * dark, 0.0)


def _coarse_shifts(target_Bhw: Tensor, reference_Bhw: Tensor, config: AlignConfig) -> Tensor:
    """The best shift of every block of the quarter images, in whole steps of them; float32 [B, G, K, 2] in pixels of
    the full image."""
    shifts = host.whole_shifts(config.reach_px).tolist()
    reach, cell = -(-config.reach_px // host.COARSE), config.block_px // host.COARSE
    height, width = target_Bhw.shape[1:]
    wide = F.pad(reference_Bhw[:, None], (reach,) * 4, mode="replicate")[:, 0]
    costs = []
    for start in range(0, len(shifts), SHIFTS_AT_ONCE):
        moved = [
            wide[:, reach + y : reach + y + height, reach + x : reach + x + width]
            for x, y in shifts[start : start + SHIFTS_AT_ONCE]
        ]
        costs.append(F.avg_pool2d(torch.stack(moved, 1).sub_(target_Bhw[:, None]).abs_(), cell))
    cost_BSGK = torch.cat(costs, 1)
    whole = cost_BSGK.mean((2, 3), keepdim=True)
    cost_BSGK = _pooled(cost_BSGK, host.COARSE_SIGMA) + host.WHOLE_SHARE * whole
    step_cost = host.STEP_COST + host.RELATIVE_STEP_COST * cost_BSGK.amin(1, keepdim=True)
    shift_S2 = _whole_shifts(config.reach_px, target_Bhw.device)
    cost_BSGK = cost_BSGK + shift_S2.abs().sum(1)[:, None, None] * step_cost
    best_BGK2 = shift_S2[cost_BSGK.argmin(1)]
    return _median5(best_BGK2.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) * host.COARSE


class _Equations:
    """See `flatout.defect.compare.align._Equations`."""

    def __init__(self, target_B1hw: Tensor, block: int, contrast_B111: Tensor) -> None:
        self._target, self._block = target_B1hw, block
        self._bound = host.UNEXPLAINED_SHARE * contrast_B111 + host.UNEXPLAINED_GREY
        # Sobel kernels, divided by 8: grey levels per pixel.
        padded = F.pad(target_B1hw, (1, 1, 1, 1), mode="replicate")[:, 0]
        x = _smooth(padded[..., 2:] - padded[..., :-2], 1)
        y = _smooth(padded[:, 2:] - padded[:, :-2], 2)
        self._gradient_B2hw = torch.stack((x, y), 1)
        self._own_B3GK = F.avg_pool2d(torch.stack((x * x, y * y, x * y), 1), block)
        xx, yy, xy = self._tensor = _means(self._own_B3GK).unbind(1)
        self._weaker = ((xx + yy) / 2 - (((xx - yy) / 2) ** 2 + xy * xy).sqrt()).clamp(min=0)
        damping = host.DAMPING + host.RELATIVE_DAMPING * (xx + yy)
        self._xx, self._yy, self._xy = xx + damping, yy + damping, xy
        self._determinant = self._xx * self._yy - xy * xy

    def solve(
        self, shift_BGK2: Tensor, moved_B1hw: Tensor, inside_B1hw: Tensor, *, box_px: int
    ) -> tuple[Tensor, Tensor]:
        reach = box_px // 2
        above = self._target - F.max_pool2d(moved_B1hw, box_px, 1, reach)
        below = -F.max_pool2d(-moved_B1hw, box_px, 1, reach) - self._target
        left_out = ((torch.maximum(above, below) > self._bound) | ~inside_B1hw).to(moved_B1hw.dtype)
        difference = (self._target - moved_B1hw) * (1 - left_out)
        side_B2GK = F.avg_pool2d(self._gradient_B2hw * difference, self._block)
        own_B2GK = shift_BGK2.permute(0, 3, 1, 2) / host.FINE
        smooth_B2GK = _pooled(own_B2GK, host.NARROW_SIGMA)
        side_B2GK = side_B2GK + _product(self._own_B3GK.unbind(1), own_B2GK)
        x, y = (_means(side_B2GK) - _product(self._tensor, smooth_B2GK)).unbind(1)
        step = (
            torch.stack((self._yy * x - self._xy * y, self._xx * y - self._xy * x), -1) / self._determinant[..., None]
        )
        step = (step * host.FINE).clamp(-host.MAX_STEP_PX, host.MAX_STEP_PX)
        shift_BGK2 = host.FINE * smooth_B2GK.permute(0, 2, 3, 1) + step
        return shift_BGK2, F.avg_pool2d(left_out, self._block)[:, 0]

    def confidence(self, unexplained_BGK: Tensor) -> Tensor:
        return self._weaker / (self._weaker + host.SURE_GRADIENT**2) * (1 - unexplained_BGK)


def _product(tensor: Sequence[Tensor], shift_B2GK: Tensor) -> Tensor:
    """Product of the symmetric matrix (xx, yy, xy) of every block with its shift, [B, 2, G, K]."""
    xx, yy, xy = tensor
    x, y = shift_B2GK.unbind(1)
    return torch.stack((xx * x + xy * y, xy * x + yy * y), 1)


def _means(blocks_BNGK: Tensor) -> Tensor:
    """Means over the surroundings of every block."""
    return _pooled(blocks_BNGK, host.NARROW_SIGMA) + host.WIDE_SHARE * _pooled(blocks_BNGK, host.WIDE_SIGMA)


def _smooth(planes_Bhw: Tensor, axis: int) -> Tensor:
    """Sums with the weights 1, 2, 1 along an axis, divided by 8; two pixels shorter."""
    side = planes_Bhw.shape[axis] - 2
    before, here, after = (planes_Bhw.narrow(axis, start, side) for start in range(3))
    return (before + 2 * here + after) / 8


def _pooled(values_BNGK: Tensor, sigma: float) -> Tensor:
    """Gaussian averages over neighbouring blocks."""
    rows, columns = (_gaussian_matrix(side, sigma, values_BNGK.device) for side in values_BNGK.shape[2:])
    return rows @ values_BNGK @ columns.T


def _moved(planes_B1HW: Tensor, shift_BHW2: Tensor) -> tuple[Tensor, Tensor]:
    """Planes moved by the shift of every pixel, and whether the position is inside the plane, bool [B, H, W]."""
    height, width = planes_B1HW.shape[2:]
    x_BHW = shift_BHW2[..., 0] + torch.arange(width, device=shift_BHW2.device)
    y_BHW = shift_BHW2[..., 1] + torch.arange(height, device=shift_BHW2.device)[:, None]
    inside_BHW = (x_BHW >= 0) & (x_BHW <= width - 1) & (y_BHW >= 0) & (y_BHW <= height - 1)
    at = torch.stack((x_BHW * (2 / max(width - 1, 1)) - 1, y_BHW * (2 / max(height - 1, 1)) - 1), -1)
    return F.grid_sample(planes_B1HW, at, mode="bilinear", padding_mode="border", align_corners=True), inside_BHW


def _dense(shift_BGK2: Tensor, shape_hw: torch.Size) -> Tensor:
    """Shifts between the centres of blocks by linear interpolation, [B, H, W, 2]."""
    planes = F.interpolate(shift_BGK2.permute(0, 3, 1, 2), size=tuple(shape_hw), mode="bilinear", align_corners=False)
    return planes.permute(0, 2, 3, 1)


def _median5(planes_BNGK: Tensor) -> Tensor:
    """Median over 5 x 5 blocks; the edge is repeated."""
    padded = F.pad(planes_BNGK, (2, 2, 2, 2), mode="replicate")
    return padded.unfold(2, 5, 1).unfold(3, 5, 1).flatten(4).median(-1).values


def _spread(planes_B1hw: Tensor) -> Tensor:
    """Standard deviation of every image, [B, 1, 1, 1]."""
    return planes_B1hw.std((1, 2, 3), correction=0, keepdim=True)


# Constants, copied to each device once: a copy from memory that is not pinned makes the host wait. Never released,
# because CUDA graphs (evaluate/maps.py) read them at their addresses.


@cache
def _gaussian_matrix(count: int, sigma: float, device: torch.device) -> Tensor:
    return _constant(host.gaussian_matrix(count, sigma), device)


@cache
def _whole_shifts(reach_px: int, device: torch.device) -> Tensor:
    return _constant(host.whole_shifts(reach_px).astype(np.float32), device)


@torch.inference_mode(False)
def _constant(values: np.ndarray, device: torch.device) -> Tensor:
    """On the device; not an inference tensor, so that any caller can use it."""
    return torch.from_numpy(values).to(device)
