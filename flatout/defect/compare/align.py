"""Local registration of a reference to target: a shift per block, to a fraction of a pixel, on the CPU.

    both images, quarter size --every whole shift, per block--> shifts to 4 px
    both images, half size    --Gauss-Newton steps, pooled over neighbouring blocks--> shifts to about 0.1 px
    reference --moved by the shifts, interpolated between blocks--> aligned reference
              --if its brightness or contrast differs clearly--> with those of target

Defects do not bend the shifts: pixels whose value occurs nowhere near in the reference are left out, because no shift
explains them, and equations are pooled over areas that are large compared with a defect. `align_torch` does the same on
any device, for batches.

Dimension key:  H W image   h w half or quarter of it   G K blocks, rows and columns   S whole shifts   2 (x, y)
                N pixels from which tones are taken
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flatout.errors import ConfigError

COARSE, FINE = 4, 2
"""Reduction of the images in which whole shifts are tried, and in which they are refined."""
COARSE_SIGMA, NARROW_SIGMA, WIDE_SIGMA = 1.5, 0.7, 4.0
"""Widths of the Gaussians over which costs and equations are pooled, in blocks."""
WIDE_SHARE = 0.05
"""Weight of the wide pool: it decides only where the narrow one has no structure."""
WHOLE_SHARE = 0.2
"""Weight of the cost over the whole image, which decides in blocks without structure."""
STEP_COST, RELATIVE_STEP_COST = 0.02, 0.02
"""What a shift by one pixel of the quarter image costs, in grey levels and relative to the best fit: of periods that
fit equally well, the nearest is taken."""
REACH_SIGMAS = 5.0
"""Where these Gaussians end: beyond, weights are below 4e-6 of the centre's."""
FIRST_BOX, LAST_BOX = 5, 3
"""Side of the neighbourhood in the half-size reference in which a pixel's value must occur, at first and for the last
step, when edges are already within a pixel of each other."""
MAX_STEP_PX, MAX_REFINED_PX = 2.0, 4.0
"""Bounds of one Gauss-Newton step and of their sum."""
DAMPING, RELATIVE_DAMPING = 0.5, 0.02
UNEXPLAINED_SHARE, UNEXPLAINED_GREY = 1 / 3, 4.0
"""How far a pixel may be outside of the range of its neighbourhood in the reference before it is left out: a share of
the contrast, and in grey levels."""
SURE_GRADIENT = 1.0
"""Root mean square gradient, in grey levels per pixel and in the weaker direction, at which the confidence is half."""

TONE_STRIDE = 8
"""Rows and columns between the pixels from which brightness and contrast are taken."""
DARK, BRIGHT = 0.01, 0.99
"""Quantiles of the reference; pixels above the middle between the two are bright, the others dark."""
MIN_TONE_SHARE = 0.02
"""Least share of the pixels that are dark, and that are bright: a defect must not be half of them."""
MIN_TONE_CONTRAST, MAX_GAIN = 8.0, 4.0
"""Least contrast, in grey levels, and largest change of it that is matched: beyond, it is no matter of light."""
TONE_DIFFERENCE = 0.1
"""Difference of dark or bright pixels, as a share of the contrast, up to which a reference keeps its own tones."""


@dataclass(frozen=True, kw_only=True)
class AlignConfig:
    """How a reference is aligned."""

    reach_px: int = 12
    """Largest shift that is looked for; another 4 px can be found by refinement."""
    block_px: int = 16
    """Side of a block, a multiple of 8. Shifts are interpolated between the centres of blocks."""
    iterations: int = 2
    """Gauss-Newton steps."""

    def __post_init__(self) -> None:
        if not 0 <= self.reach_px <= 64:
            raise ConfigError(f"align_px={self.reach_px}: the largest shift must lie in 0..64 pixels.")
        if self.block_px < 8 or self.block_px % 8:
            raise ConfigError(f"block_px={self.block_px}: it must be a multiple of 8.")


class Alignment(NamedTuple):
    """An aligned reference and how it was aligned. The caller owns the arrays."""

    reference_HW: np.ndarray
    """The reference, moved to where it fits target, in its own dtype, and with the brightness and contrast of target if
    its own differ clearly. Where it would have to be known beyond its edge, it repeats target: nothing can be compared
    there."""
    inside_HW: np.ndarray
    """bool: False where `reference_HW` repeats target."""
    shift_GK2: np.ndarray
    """float32, (x, y) in pixels: pixel p of target shows what the reference shows at p + shift."""
    confidence_GK: np.ndarray
    """float32 in 0..1: how well the images determine both components of a block's shift. It is low where there is no
    structure or structure in one direction only (the shift along an edge is then that of the surroundings), and where
    much of target cannot be explained by any shift."""


def align(target_HW: np.ndarray, reference_HW: np.ndarray, config: AlignConfig | None = None) -> Alignment:
    """Align a reference to target, both [H, W] in 0..255 of any number type and of one size."""
    shift_GK2, confidence_GK = find_shifts(target_HW, reference_HW, config)
    aligned_HW, inside_HW = moved_reference(target_HW, reference_HW, shift_GK2, config)
    return Alignment(aligned_HW, inside_HW, shift_GK2, confidence_GK)


def find_shifts(
    target_HW: np.ndarray, reference_HW: np.ndarray, config: AlignConfig | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Shifts and confidences as in `Alignment`, without moving anything."""

    if target_HW.shape != reference_HW.shape or target_HW.ndim != 2:
        raise ConfigError(
            f"target of shape {target_HW.shape} and reference of shape {reference_HW.shape} cannot be aligned: both "
            "must be grey images of one size."
        )
    config = config or AlignConfig()
    target, reference = (_padded(plane, config.block_px).astype(np.float32) for plane in (target_HW, reference_HW))
    target2_hw, reference2_hw = (_reduced(plane, FINE) for plane in (target, reference))
    target4_hw, reference4_hw = (_reduced(plane, COARSE // FINE) for plane in (target2_hw, reference2_hw))
    # Brightness and contrast of the reference are made those of target: the equations compare values.
    contrast, gain, offset = _contrast(target4_hw, reference4_hw)
    coarse_GK2 = _coarse_shifts(target4_hw, reference4_hw * gain + offset, config)
    shift_GK2, unexplained_GK = coarse_GK2, np.zeros(coarse_GK2.shape[:2], np.float32)
    equations = _Equations(target2_hw, config.block_px // FINE, contrast)
    reference2_hw = reference2_hw * gain + offset
    for number in range(config.iterations):
        there_hw2 = _dense(shift_GK2 / FINE, target2_hw.shape) + _positions(target2_hw.shape)
        moved_hw = _remapped(reference2_hw, there_hw2)
        inside_hw = _inside(there_hw2, band=int(np.abs(shift_GK2).max() / FINE) + 1)
        box_px = LAST_BOX if number == config.iterations - 1 else FIRST_BOX
        shift_GK2, unexplained_GK = equations.solve(shift_GK2, moved_hw, inside_hw, box_px=box_px)
        shift_GK2 = np.clip(shift_GK2, coarse_GK2 - MAX_REFINED_PX, coarse_GK2 + MAX_REFINED_PX)
    return shift_GK2, equations.confidence(unexplained_GK)


def _remapped(source_HW: np.ndarray, there_HW2: np.ndarray) -> np.ndarray:
    """The values of an image at other positions, interpolated; beyond its border those of the border."""
    import cv2

    # The second map must be None if the first has both coordinates: OpenCV 5.0 reads an empty one wrongly.
    return cv2.remap(source_HW, there_HW2, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)  # type: ignore[call-overload, no-any-return]


def moved_reference(
    target_HW: np.ndarray, reference_HW: np.ndarray, shift_GK2: np.ndarray, config: AlignConfig | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The reference moved by shifts, with tones that can be compared, and where it is known; as in `Alignment`."""

    block = (config or AlignConfig()).block_px
    height, width = target_HW.shape
    padded_hw = shift_GK2.shape[0] * block, shift_GK2.shape[1] * block
    there_HW2 = np.ascontiguousarray(_dense(shift_GK2, padded_hw)[:height, :width])
    there_HW2 += _positions((height, width))
    source = reference_HW if reference_HW.dtype in (np.uint8, np.float32) else reference_HW.astype(np.float32)
    moved_HW = _remapped(source, there_HW2)
    inside_HW = _inside(there_HW2, band=int(np.abs(shift_GK2).max()) + 1)
    gain, offset = tone_change(target_HW, moved_HW, inside_HW)
    if (gain, offset) != (1.0, 0.0):
        toned_HW = np.clip(moved_HW.astype(np.float32) * np.float32(gain) + np.float32(offset), 0, 255)
        moved_HW = (np.rint(toned_HW) if moved_HW.dtype == np.uint8 else toned_HW).astype(moved_HW.dtype)
    np.copyto(moved_HW, target_HW, where=~inside_HW, casting="unsafe")
    return moved_HW, inside_HW


def tone_change(target_HW: np.ndarray, moved_HW: np.ndarray, inside_HW: np.ndarray) -> tuple[float, float]:
    """Gain and offset that give an aligned reference the brightness and contrast of target.

    From the medians of its dark and of its bright pixels, and of target there, so that defects do not count. 1 and 0 if
    they differ by little, or by what no lamp or camera explains.
    """
    each = np.s_[::TONE_STRIDE, ::TONE_STRIDE]
    inside_hw = inside_HW[each]
    # Bytes, whose order statistics follow from counts, here as in `align_torch`.
    target_N, moved_N = (
        np.clip(np.rint(plane_HW[each][inside_hw]), 0, 255).astype(np.uint8) for plane_HW in (target_HW, moved_HW)
    )
    if not len(moved_N):
        return 1.0, 0.0
    ends = [_order_statistic(moved_N, int((len(moved_N) - 1) * share)) for share in (DARK, BRIGHT)]
    is_bright_N = 2 * moved_N.astype(np.int16) > sum(ends)
    if not MIN_TONE_SHARE <= is_bright_N.mean() <= 1 - MIN_TONE_SHARE:
        return 1.0, 0.0
    dark, bright, wanted_dark, wanted_bright = (
        _order_statistic(values_N[among_N], (int(among_N.sum()) - 1) // 2)
        for values_N in (moved_N, target_N)
        for among_N in (~is_bright_N, is_bright_N)
    )
    contrast = bright - dark
    differs = max(abs(wanted_dark - dark), abs(wanted_bright - bright)) > TONE_DIFFERENCE * contrast
    gain = (wanted_bright - wanted_dark) / contrast if contrast >= MIN_TONE_CONTRAST else 0.0
    if not differs or not 1 / MAX_GAIN <= gain <= MAX_GAIN:
        return 1.0, 0.0
    return gain, wanted_dark - gain * dark


def _order_statistic(values_N: np.ndarray, rank: int) -> int:
    """The value at a position, from 0, of sorted bytes."""
    return int(np.searchsorted(np.cumsum(np.bincount(values_N, minlength=256)), rank, side="right"))


def _inside(there_HW2: np.ndarray, *, band: int) -> np.ndarray:
    """Whether positions (x, y) lie inside the image, bool [H, W]; those farther than `band` from an edge do."""
    height, width = there_HW2.shape[:2]
    inside_HW = np.ones((height, width), np.bool_)
    for axis, length in ((0, width), (1, height)):
        positions, inside = (there_HW2[..., 0], inside_HW) if axis == 0 else (there_HW2[..., 1].T, inside_HW.T)
        inside[:, :band] &= positions[:, :band] >= 0
        inside[:, -band:] &= positions[:, -band:] <= length - 1
    return inside_HW


def _coarse_shifts(target_hw: np.ndarray, reference_hw: np.ndarray, config: AlignConfig) -> np.ndarray:
    """The whole shift of every block that fits best, in pixels of the full image; float32 [G, K, 2]."""
    import cv2

    shift_S2 = whole_shifts(config.reach_px)
    reach, cell = -(-config.reach_px // COARSE), config.block_px // COARSE
    height, width = target_hw.shape
    blocks_gk = height // cell, width // cell
    wide = cv2.copyMakeBorder(reference_hw, reach, reach, reach, reach, cv2.BORDER_REPLICATE)
    differs_Shw = np.empty((len(shift_S2), height, width), np.float32)
    for differs_hw, (x, y) in zip(differs_Shw, shift_S2.tolist(), strict=True):
        cv2.absdiff(target_hw, wide[reach + y : reach + y + height, reach + x : reach + x + width], differs_hw)
    # The blocks of all shifts in one call, one below the other.
    tall_gk = len(shift_S2) * blocks_gk[0], blocks_gk[1]
    cost = cv2.resize(differs_Shw.reshape(-1, width), tall_gk[::-1], interpolation=cv2.INTER_AREA)
    cost_GSK = np.ascontiguousarray(cost.reshape(-1, *blocks_gk).transpose(1, 0, 2))
    whole_S1 = cost_GSK.mean((0, 2))[:, None]
    cost_GSK = pooled(cost_GSK, COARSE_SIGMA) + WHOLE_SHARE * whole_S1
    step_cost_G1K = STEP_COST + RELATIVE_STEP_COST * cost_GSK.min(1, keepdims=True)
    cost_GSK += np.abs(shift_S2).sum(1).astype(np.float32)[:, None] * step_cost_G1K
    best_GK2 = shift_S2[cost_GSK.argmin(1)].astype(np.float32)
    # A median, so that single blocks that fit better elsewhere by chance do not count.
    return np.stack([cv2.medianBlur(np.ascontiguousarray(best_GK2[..., axis]), 5) for axis in (0, 1)], -1) * COARSE


class _Equations:
    """The equations that relate the shift of every block to the differences that are left, from gradients of target.

    With gradient g and difference d at a pixel of a block with shift s, the shift t makes the difference d - g (t - s).
    Least squares over a pool of blocks is (sum g g^T) t = sum (g g^T s + g d), two equations per block.
    """

    def __init__(self, target_hw: np.ndarray, block: int, contrast: float) -> None:
        import cv2

        self._target_hw = target_hw
        self._blocks_gk = target_hw.shape[0] // block, target_hw.shape[1] // block
        self._bound = UNEXPLAINED_SHARE * contrast + UNEXPLAINED_GREY
        # Sobel kernels, divided by 8: grey levels per pixel.
        self._x_hw = cv2.Sobel(target_hw, cv2.CV_32F, 1, 0, scale=1 / 8, borderType=cv2.BORDER_REPLICATE)
        self._y_hw = cv2.Sobel(target_hw, cv2.CV_32F, 0, 1, scale=1 / 8, borderType=cv2.BORDER_REPLICATE)
        products = (self._x_hw * self._x_hw, self._y_hw * self._y_hw, self._x_hw * self._y_hw)
        self._own_G3K = self._blocks(*products)
        xx, yy, xy = self._pooled(self._own_G3K)
        self._tensor = xx, yy, xy
        self._weaker_GK = np.maximum((xx + yy) / 2 - np.sqrt(((xx - yy) / 2) ** 2 + xy * xy), 0)
        damping = DAMPING + RELATIVE_DAMPING * (xx + yy)
        self._xx, self._yy, self._xy = xx + damping, yy + damping, xy
        self._determinant = self._xx * self._yy - xy * xy

    def solve(
        self, shift_GK2: np.ndarray, moved_hw: np.ndarray, inside_hw: np.ndarray, *, box_px: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """New shifts, float32 [G, K, 2], and the share of pixels that were left out, float32 [G, K].

        `moved_hw` is the reference moved by `shift_GK2`. Left out are pixels that are not inside the reference, and
        those whose value does not occur in the box around them there.
        """
        import cv2

        difference_hw = self._target_hw - moved_hw
        box = np.ones((box_px, box_px), np.uint8)
        above_hw = self._target_hw - cv2.dilate(moved_hw, box)
        below_hw = cv2.erode(moved_hw, box) - self._target_hw
        left_out_hw = (np.maximum(above_hw, below_hw) > self._bound) | ~inside_hw
        difference_hw[left_out_hw] = 0
        side_G2K = self._blocks(self._x_hw * difference_hw, self._y_hw * difference_hw)
        # In pixels of the half-size image, as differences from a smooth field: damping draws shifts towards it.
        own_G2K = shift_GK2.transpose(0, 2, 1) / FINE
        smooth_G2K = pooled(np.ascontiguousarray(own_G2K), NARROW_SIGMA)
        xx, yy, xy = self._own_G3K.transpose(1, 0, 2)
        side_G2K[:, 0] += xx * own_G2K[:, 0] + xy * own_G2K[:, 1]
        side_G2K[:, 1] += xy * own_G2K[:, 0] + yy * own_G2K[:, 1]
        x, y = self._pooled(side_G2K)
        xx, yy, xy = self._tensor
        x -= xx * smooth_G2K[:, 0] + xy * smooth_G2K[:, 1]
        y -= xy * smooth_G2K[:, 0] + yy * smooth_G2K[:, 1]
        step_G2K = np.stack((self._yy * x - self._xy * y, self._xx * y - self._xy * x), 1) / self._determinant[:, None]
        shift_G2K = FINE * smooth_G2K + np.clip(step_G2K * FINE, -MAX_STEP_PX, MAX_STEP_PX)
        left_out_GK = self._blocks(left_out_hw.astype(np.float32))[:, 0]
        return np.ascontiguousarray(shift_G2K.transpose(0, 2, 1)), left_out_GK

    def confidence(self, unexplained_GK: np.ndarray) -> np.ndarray:
        """See `Alignment.confidence_GK`."""
        return np.asarray(self._weaker_GK / (self._weaker_GK + SURE_GRADIENT**2) * (1 - unexplained_GK), np.float32)

    def _blocks(self, *planes_hw: np.ndarray) -> np.ndarray:
        """Means of every block, float32 [G, N, K] for N planes."""
        import cv2

        size = self._blocks_gk[::-1]
        return np.stack([cv2.resize(plane_hw, size, interpolation=cv2.INTER_AREA) for plane_hw in planes_hw], 1)

    def _pooled(self, values_GNK: np.ndarray) -> np.ndarray:
        """Means over the surroundings of every block, float32 [N, G, K]."""
        both = pooled(values_GNK, NARROW_SIGMA) + WIDE_SHARE * pooled(values_GNK, WIDE_SIGMA)
        return np.asarray(both.transpose(1, 0, 2))


def pooled(values_GNK: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian averages over neighbouring blocks, float32 [G, N, K]: products with `gaussian_matrix` on both axes."""
    import cv2

    # By filters, because BLAS would multiply matrices in threads of its own. They wait for each other: beside other
    # programs they took three times the CPU time.
    rows, num, columns = values_GNK.shape
    reach = math.ceil(REACH_SIGMAS * sigma)
    weight_T, one = _gaussian_weights(np.arange(-reach, reach + 1), sigma), np.ones(1)
    zeros = cv2.BORDER_CONSTANT
    summed = cv2.sepFilter2D(values_GNK.reshape(rows, num * columns), -1, one, weight_T, borderType=zeros)
    summed = cv2.sepFilter2D(summed.reshape(rows * num, columns), -1, weight_T, one, borderType=zeros)
    # The weight of a block itself is 1, so these diagonals hold what its sums must be multiplied by.
    row_G, column_K = (gaussian_matrix(count, sigma).diagonal() for count in (rows, columns))
    return np.asarray(summed.reshape(values_GNK.shape) * (row_G[:, None] * column_K)[:, None])


def whole_shifts(reach_px: int) -> np.ndarray:
    """Shifts (x, y) to try, in pixels of the quarter image, nearest first; int64 [S, 2]."""
    side = np.arange(-(-reach_px // COARSE), -1 - (-(-reach_px // COARSE)), -1)
    shift_S2 = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    return shift_S2[np.argsort(np.abs(shift_S2).sum(1), kind="stable")]


@lru_cache(maxsize=64)
def gaussian_matrix(count: int, sigma: float) -> np.ndarray:
    """Gaussian averages along an axis as a matrix, float32 [count, count]; at the edges of what is there."""
    at = np.arange(count)
    weight = _gaussian_weights(at[:, None] - at, sigma)
    return np.asarray(weight / weight.sum(1, keepdims=True), np.float32)


def _gaussian_weights(distance: np.ndarray, sigma: float) -> np.ndarray:
    """1 at a distance of 0, and 0 beyond REACH_SIGMAS * sigma."""
    return np.where(np.abs(distance) <= REACH_SIGMAS * sigma, np.exp(-(distance**2) / (2 * sigma**2)), 0)


@lru_cache(maxsize=8)
def _positions(shape_hw: tuple[int, int]) -> np.ndarray:
    """The position (x, y) of every pixel, float32 [H, W, 2]."""
    y, x = np.indices(shape_hw, np.float32)
    return np.stack((x, y), -1)


def _dense(shift_GK2: np.ndarray, shape_hw: tuple[int, ...]) -> np.ndarray:
    """Shifts between the centres of blocks by linear interpolation, float32 [H, W, 2]."""
    import cv2

    return cv2.resize(shift_GK2, (shape_hw[1], shape_hw[0]), interpolation=cv2.INTER_LINEAR)


def _contrast(target_hw: np.ndarray, reference_hw: np.ndarray) -> tuple[float, float, float]:
    """Contrast of target, and the gain and offset that give the reference its brightness and contrast."""
    wanted, own = float(target_hw.std()), float(reference_hw.std())
    gain = wanted / own if own > 0 else 1.0
    return wanted, gain, float(target_hw.mean()) - gain * float(reference_hw.mean())


def _padded(plane_HW: np.ndarray, multiple: int) -> np.ndarray:
    """With its edge repeated to the right and below, up to a multiple of the side of a block."""
    bottom, right = (-side % multiple for side in plane_HW.shape)
    return np.pad(plane_HW, ((0, bottom), (0, right)), mode="edge") if bottom or right else plane_HW


def _reduced(plane_HW: np.ndarray, by: int) -> np.ndarray:
    import cv2

    height, width = plane_HW.shape
    return cv2.resize(plane_HW, (width // by, height // by), interpolation=cv2.INTER_AREA)
