"""The differences of `classical` in torch: for batches, on any device, without a host-device wait.

Exactly the same integers: differences, dilations and erosions of bytes. Only the components are left to the host.

Dimension key:  B images   C planes (target, ref1, ref2; without ref2 if it repeats ref1)   H W image
                N pixels from which the contrast is taken
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.defect.compare.classical import BRIGHT, CORE_SHARE, DARK, MIN_CONTRAST, MIN_DIFFERENCE, STRIDE


class DifferencesBatch(NamedTuple):
    """As `flatout.defect.compare.classical.Differences`, for a batch; tensors on the device of the planes."""

    drawn_BHW: Tensor
    there_BHW: Tensor
    missing_BHW: Tensor
    contrast_B: Tensor
    """float64."""


def find_differences_batch(planes_BCHW: Tensor) -> DifferencesBatch:
    """The differences of targets to their references, which must be aligned; planes in 0..255 of any number type."""
    planes_BCHW = planes_BCHW.round().clamp(0, 255).to(torch.uint8)
    target_BHW = planes_BCHW[:, 0]
    contrast_B = _contrast(planes_BCHW[:, 1, ::STRIDE, ::STRIDE].flatten(1)).clamp(min=MIN_CONTRAST)
    bound_B11 = (MIN_DIFFERENCE * contrast_B)[:, None, None]
    differs, there, missing = _differences(target_BHW, planes_BCHW[:, 1])
    for number in range(2, planes_BCHW.shape[1]):
        others = _differences(target_BHW, planes_BCHW[:, number])
        differs, there, missing = map(torch.minimum, (differs, there, missing), others)
    # Compared as integers: a byte is above a bound if it is above the integer below it.
    drawn = _opened(differs > bound_B11.floor().to(torch.int16))
    drawn |= torch.maximum(there, missing) > (bound_B11 * CORE_SHARE).floor().to(torch.int16)
    return DifferencesBatch(drawn.to(torch.uint8), there, missing, contrast_B)


def _differences(target_BHW: Tensor, reference_BHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `flatout.defect.compare.classical._differences`."""
    larger, smaller = torch.maximum(target_BHW, reference_BHW), torch.minimum(target_BHW, reference_BHW)
    return larger - smaller, _unexplained(target_BHW, reference_BHW), _unexplained(reference_BHW, target_BHW)


def _unexplained(here_BHW: Tensor, there_BHW: Tensor) -> Tensor:
    """See `flatout.defect.compare.classical._unexplained`. Bytes must not become negative."""
    highest = _extreme_3x3(there_BHW, torch.maximum)
    lowest = _extreme_3x3(there_BHW, torch.minimum)
    return torch.maximum(torch.maximum(here_BHW, highest) - highest, lowest - torch.minimum(lowest, here_BHW))


def _extreme_3x3(planes_BHW: Tensor, extreme: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The highest or lowest value in the 3 x 3 pixels around each, those of them that exist."""
    for axis in (1, 2):
        planes_BHW = _with_next(_with_next(planes_BHW, axis, -1, extreme), axis, 1, extreme, planes_BHW)
    return planes_BHW


def _opened(mask_BHW: Tensor) -> Tensor:
    """See `flatout.defect.compare.classical.opened`; bool."""
    for axis in (1, 2):
        mask_BHW = _with_next(mask_BHW, axis, -1, torch.logical_and)
    for axis in (1, 2):
        mask_BHW = _with_next(mask_BHW, axis, 1, torch.logical_or)
    return mask_BHW


def _with_next(
    planes_BHW: Tensor, axis: int, step: int, combine: Callable[[Tensor, Tensor], Tensor], source: Tensor | None = None
) -> Tensor:
    """Every pixel combined with the pixel of `source` before it (step -1) or after it (1); the outermost ones stay."""
    source = planes_BHW if source is None else source
    side = planes_BHW.shape[axis] - 1
    first, last = (1, 0) if step < 0 else (0, 1)
    combined = combine(planes_BHW.narrow(axis, first, side), source.narrow(axis, last, side))
    outermost = planes_BHW.narrow(axis, 0 if step < 0 else side, 1)
    return torch.cat((outermost, combined) if step < 0 else (combined, outermost), axis)


def _contrast(values_BN: Tensor) -> Tensor:
    """Grey levels between the darkest and the brightest percent of the pixels, float64 [B].

    Between two order statistics by linear interpolation, as `numpy.quantile` does. Each is found by bisection, because
    sorting takes longer.
    """
    places = [share * (values_BN.shape[1] - 1) for share in (DARK, BRIGHT)]
    ranks = [rank for place in places for rank in (math.floor(place), math.ceil(place))]
    low_0, low_1, high_0, high_1 = (order_statistic(values_BN, rank).double() for rank in ranks)
    low, high = (
        first + (second - first) * (place - math.floor(place))
        for first, second, place in ((low_0, low_1, places[0]), (high_0, high_1, places[1]))
    )
    return high - low


def order_statistic(values_BN: Tensor, rank: int | Tensor, among_BN: Tensor | None = None) -> Tensor:
    """The value at a position, from 0, of sorted bytes; int16 [B].

    `rank` may differ by image, int64 [B]. `among_BN`: only values where this is True; the position must exist.
    """
    found_B = values_BN.new_zeros(len(values_BN), dtype=torch.int16)
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):
        # The value is found_B + bit or more if no more than `rank` values are below that.
        is_below_BN = values_BN < (found_B + bit)[:, None]
        is_more_B = (is_below_BN if among_BN is None else is_below_BN & among_BN).sum(1) <= rank
        found_B = found_B + bit * is_more_B
    return found_B
