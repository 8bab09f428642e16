"""Draws all random parameters of a micro-batch before any pixel is touched; each row depends on its position alone.

The result are explicit parameters, the same for painting on the CPU and on a GPU.

Dimension key:  M samples   K defects per sample at most   C planes (target, ref1, ref2)   L lines   G groups
                R ranges of amplitudes   Q kernels
"""

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise

import numpy as np

from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.pool import Kernels
from flatout.feed import keyed_uniform

# Allocation: which planes a defect is painted into, decided for whole batches.
#
#     T   target alone: these are labelled                    R1  target and ref1
#     B   all three planes                                    R2  target and ref2

T, R1, R2, B = range(4)
MAX_TARGET_ONLY = 2
IN_PLANE_GC = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 1]], np.bool_)
"""Whether a defect of a group is painted into a plane."""


def num_target_only(num_M: np.ndarray, uniform_M: np.ndarray, *, least: int = 1) -> np.ndarray:
    """Number of the n defects that are in target alone: uniform on {least, ..., min(2, n // 2)}; int64 [M]."""
    most_M = np.minimum(MAX_TARGET_ONLY, num_M // 2)
    return np.asarray(least + (uniform_M * (most_M - least + 1)).astype(np.int64))


def random_ranks(key_MK: np.ndarray, num_M: np.ndarray) -> np.ndarray:
    """Rank of each of the first n defects in a random order given by random keys, int64 [M, K]."""
    unused_MK = np.arange(key_MK.shape[1]) >= num_M[:, None]
    order_MK = np.argsort(np.where(unused_MK, 2.0, key_MK), axis=1, kind="stable")
    return np.argsort(order_MK, axis=1)  # the inverse permutation


def groups_by_rank(rank_MK: np.ndarray, num_M: np.ndarray, target_only_M: np.ndarray, coin_M: np.ndarray) -> np.ndarray:
    """Group of each defect, int64 [M, K]; undefined from defect n on.

    The first t in the order are T. Of the r that follow, r // 3 are R1, as many R2, and the rest B; if r is 1, the
    defect is R2 where `coin_M` (bool) is true, else R1.
    """
    after_MK = rank_MK - target_only_M[:, None]
    rest_M = num_M - target_only_M
    third_M = (rest_M // 3)[:, None]
    group_MK = np.where(after_MK < third_M, R1, np.where(after_MK < 2 * third_M, R2, B))
    group_MK = np.where((rest_M == 1)[:, None], np.where(coin_M, R2, R1)[:, None], group_MK)
    return np.asarray(np.where(after_MK < 0, T, group_MK))


# Parameters of samples

MAX_LINES = 3
PLAIN, DEFECTS, LINES, HARD_NEGATIVE = range(4)
"""Kinds of samples."""
NOISE_POSITIONS = 512
"""Positions along each axis of the noise table at which the noise of a plane may begin."""

_BASE, _PER_DEFECT, _PER_LEAK, _PER_LINE, _PER_PLANE = 6, 6, 3, 5, 6
"""Random numbers per sample, defect, leak, line and plane."""
_BOX_MARGIN = 2
"""Pixels between the box of a kernel and the patch's edge, in other modes than gaussian."""


def draw_samples(
    config: SynthConfig,
    kernels: Kernels,
    patch_hw: tuple[int, int],
    seed: int,
    epoch: int,
    positions_M: np.ndarray,
) -> dict[str, np.ndarray]:
    """Parameters of M samples by name, as `_defects`, `_lines` and `_disturbances` describe them."""
    max_defects = config.num_defects[1]
    # Features that are off draw no numbers. Their numbers come last, so that switching one on leaves the others as
    # they are.
    leaks = _PER_LEAK * max_defects if config.partial_leak_prob else 0
    lines = 1 + _PER_LINE * MAX_LINES if config.line_ratio else 0
    planes = _PER_PLANE * 3 if config.has_disturbances else 0
    ends = list(accumulate((_BASE, _PER_DEFECT * max_defects, leaks, lines, planes), initial=0))
    uniform = keyed_uniform(seed, epoch, positions_M, ends[-1])
    base, per_defect, leak, line, plane = (uniform[:, begin:end] for begin, end in pairwise(ends))
    kind_M = _kinds(config, base[:, 0])
    draws = {"kind": kind_M, "crop": base[:, 4:6]}
    leak_MK3 = leak.reshape(len(base), max_defects, _PER_LEAK) if leaks else None
    draws |= _defects(config, kernels, patch_hw, kind_M, base, per_defect.reshape(len(base), max_defects, -1), leak_MK3)
    if lines:
        draws |= _lines(line)
    if planes:
        draws |= _disturbances(config, plane.reshape(len(base), 3, _PER_PLANE))
    return draws


def _kinds(config: SynthConfig, uniform_M: np.ndarray) -> np.ndarray:
    """Kind of each sample, int8 [M]."""
    lines_from = config.hard_negative_ratio
    rest_from = lines_from + config.line_ratio
    defects_to = rest_from + (1 - rest_from) * config.defect_share
    kind_M = np.where(uniform_M < defects_to, DEFECTS, PLAIN)
    kind_M = np.where(uniform_M < rest_from, LINES, kind_M)
    return np.asarray(np.where(uniform_M < lines_from, HARD_NEGATIVE, kind_M), np.int8)


def _defects(
    config: SynthConfig,
    kernels: Kernels,
    patch_hw: tuple[int, int],
    kind_M: np.ndarray,
    base: np.ndarray,
    defect_MK6: np.ndarray,
    leak_MK3: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """`num` int32 [M]; `center` int32 [M, K, 2] (x, y); `kernel` int32 [M, K]; `amplitude` float32 [M, K, C], 0 in
    planes without the defect; `labelled` bool [M, K]."""
    low, high = config.num_defects
    num_M = low + (base[:, 1] * (high - low + 1)).astype(np.int64)
    target_only_M = num_target_only(num_M, base[:, 2], least=config.min_target_only)
    key_MK, x_MK, y_MK, shape_MK, pick_MK, value_MK = (defect_MK6[..., column] for column in range(_PER_DEFECT))
    group_MK = groups_by_rank(random_ranks(key_MK, num_M), num_M, target_only_M, base[:, 3] < 0.5)
    kernel_MK = (shape_MK * len(kernels)).astype(np.int32)
    amplitude_MK = _signed_amplitudes(config, pick_MK, value_MK)
    in_plane_MKC = IN_PLANE_GC[group_MK].astype(np.float32)
    if leak_MK3 is not None:
        _add_leaks(config, in_plane_MKC, group_MK == T, leak_MK3)
    if config.one_reference:
        in_plane_MKC[:, :, 1:] = in_plane_MKC[:, :, 1:].max(2, keepdims=True)
    used_MK = np.arange(defect_MK6.shape[1]) < num_M[:, None]
    return {
        "num": np.where(kind_M == DEFECTS, num_M, 0).astype(np.int32),
        "center": _centers(config, kernels, patch_hw, kernel_MK, x_MK, y_MK),
        "kernel": kernel_MK,
        "amplitude": amplitude_MK[:, :, None].astype(np.float32) * in_plane_MKC,
        "labelled": (group_MK == T) & used_MK,
    }


def _signed_amplitudes(config: SynthConfig, pick_MK: np.ndarray, value_MK: np.ndarray) -> np.ndarray:
    """Choose a range and a sign, each equally likely, then a uniform value in the range."""
    range_R2 = np.asarray(config.amplitudes)
    choice_MK = (pick_MK * 2 * len(range_R2)).astype(np.int64)
    chosen_MK2 = range_R2[choice_MK // 2]
    low_MK = chosen_MK2[..., 0]
    return np.asarray((1 - 2 * (choice_MK % 2)) * (low_MK + value_MK * (chosen_MK2[..., 1] - low_MK)))


def _add_leaks(config: SynthConfig, in_plane_MKC: np.ndarray, target_only_MK: np.ndarray, leak_MK3: np.ndarray) -> None:
    """Add a weak copy of some target-only defects to one reference, as a share of the amplitude, in place."""
    low, high = config.partial_leak_scale
    leaks_MK = target_only_MK & (leak_MK3[:, :, 0] < config.partial_leak_prob)
    scale_MK = np.where(leaks_MK, low + leak_MK3[:, :, 2] * (high - low), 0)
    in_ref2_MK = leak_MK3[:, :, 1] >= 0.5
    in_plane_MKC[:, :, 1] += np.where(in_ref2_MK, 0, scale_MK)
    in_plane_MKC[:, :, 2] += np.where(in_ref2_MK, scale_MK, 0)


def _centers(
    config: SynthConfig,
    kernels: Kernels,
    patch_hw: tuple[int, int],
    kernel_MK: np.ndarray,
    x_MK: np.ndarray,
    y_MK: np.ndarray,
) -> np.ndarray:
    """Centres (x, y), int32 [M, K, 2]: at least `margin` away from the edge; in other modes than gaussian, the whole
    box of the kernel at least two pixels."""
    center_MK2 = np.empty((*x_MK.shape, 2), np.int32)
    for column, (uniform_MK, axis) in enumerate(((x_MK, 1), (y_MK, 0))):
        if config.mode == "gaussian":
            num_centers = max(patch_hw[axis] - 2 * config.margin, 1)
            center_MK2[..., column] = config.margin + uniform_MK * num_centers
            continue
        length_MK = kernels.size_Q2[:, axis][kernel_MK]
        num_centers_MK = np.maximum(patch_hw[axis] - length_MK + 1 - 2 * _BOX_MARGIN, 1)
        center_MK2[..., column] = length_MK // 2 + _BOX_MARGIN + np.floor(uniform_MK * num_centers_MK)
    return center_MK2


def _lines(uniform: np.ndarray) -> dict[str, np.ndarray]:
    """`num_lines` int32 [M]; `lines` float32 [M, L, 5]: horizontal, width, position, dark, strength. All but the width
    are uniform numbers, because what a line can be depends on the pixels under it; see `paint.choose_line`."""
    line_ML5 = uniform[:, 1:].reshape(len(uniform), MAX_LINES, _PER_LINE).astype(np.float32)
    line_ML5[:, :, 1] = 1 + (line_ML5[:, :, 1] >= 0.5)
    return {"num_lines": 1 + (uniform[:, 0] * MAX_LINES).astype(np.int32), "lines": line_ML5}


def _disturbances(config: SynthConfig, uniform_MC6: np.ndarray) -> dict[str, np.ndarray]:
    """`shift` float32 [M, C, 2] (x, y), zero for target; `gain` and `offset` float32 [M, C]; `noise_at` int32
    [M, C, 2], where in the noise table the noise of a plane begins."""
    if config.one_reference:
        uniform_MC6 = uniform_MC6[:, [0, 1, 1]]
    centred = 2 * uniform_MC6 - 1
    shift_MC2 = centred[:, :, :2] * config.shift_px
    shift_MC2[:, 0] = 0
    return {
        "shift": shift_MC2.astype(np.float32),
        "gain": (1 + centred[:, :, 2] * config.gain).astype(np.float32),
        "offset": (centred[:, :, 3] * config.offset).astype(np.float32),
        "noise_at": (uniform_MC6[:, :, 4:6] * NOISE_POSITIONS).astype(np.int32),
    }


def row_of(draws: Mapping[str, np.ndarray], sample: int) -> dict[str, np.ndarray]:
    """The parameters of one sample."""
    return {name: array[sample] for name, array in draws.items()}


# Drawing in blocks
#
# Drawing takes about a hundred small array operations, whether for one sample or for sixteen. The parameters of a
# sample depend on its position alone, so those of its neighbours are drawn with it and kept.

BLOCK = 16
"""Positions that are drawn together; a request for half as many or more is drawn by itself."""

DrawnParams = dict[str, np.ndarray]
Draw = Callable[[int, int, np.ndarray], DrawnParams]
"""(seed, epoch, positions [M]) -> arrays [M, ...], each row a function of its position."""


class BlockDraw:
    """A `Draw` that draws a block of positions at a time and keeps the last block. Thread-safe and picklable."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._kept: tuple[tuple[int, int, int], DrawnParams] | None = None

    def __call__(self, seed: int, epoch: int, positions_M: np.ndarray) -> DrawnParams:
        first, last = int(positions_M[0]), int(positions_M[-1])
        begin = first // BLOCK * BLOCK
        in_order = last - first == len(positions_M) - 1 and (
            len(positions_M) < 2 or bool((np.diff(positions_M) == 1).all())
        )
        if 2 * len(positions_M) >= BLOCK or last >= begin + BLOCK or not in_order:
            return self._draw(seed, epoch, positions_M)
        kept = self._kept
        if kept is None or kept[0] != (seed, epoch, begin):
            block = self._draw(seed, epoch, np.arange(begin, begin + BLOCK))
            # One assignment, so that other threads see either the whole block or the old one.
            kept = self._kept = (seed, epoch, begin), block
        return {name: array[first - begin : last - begin + 1] for name, array in kept[1].items()}
