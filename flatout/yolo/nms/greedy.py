"""Greedy suppression kernels: the choice of one, and the sweep kernel on the host.

Dimension key:  B images   M candidates, best first in each image   D survivors
                S, T boxes on the sweep line   P pairs of boxes close to each other   E pairs that overlap too much
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError
from flatout.kernels import HAS_TRITON
from flatout.yolo.data.image_set import ranges

# Choice of the kernel

Kernel = Callable[[Tensor, Tensor, float, int], Tensor]
"""(boxes float32 [M, 4], candidates per image int64 [B], threshold, max_det) -> survivors, ascending int64 [D].

A box is removed if its IoU with a better survivor of its image is greater than the threshold, a float32 number.
"""


def kernel_named(name: str, device: torch.device) -> Kernel:
    """The kernel of this name for the device; "auto" only chooses what is installed, "triton" may raise ConfigError."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and HAS_TRITON else "sweep"
    if name == "triton":
        if device.type != "cuda":
            raise ConfigError(f'nms.kernel="triton" needs CUDA, but the predictions are on {device}. Use "auto".')
        from flatout.yolo.nms.greedy_triton import greedy_kernel

        return greedy_kernel
    return sweep_kernel


def float32_at_most(threshold: float) -> float:
    """The largest float32 number that is not above a threshold: a float32 value exceeds either both or neither."""
    nearest = np.float32(threshold)
    return float(nearest if float(nearest) <= threshold else np.nextafter(nearest, np.float32(-1)))


# The sweep kernel: greedy suppression on the host, for many images at once, without comparing most of the pairs
#
# Two facts reduce the work. An image needs only its first `max_det` survivors, and whether a candidate survives depends
# on better candidates only: so candidates are processed in blocks, best first, and an image is finished when it has
# enough. And boxes that overlap by more than the threshold have left edges close to each other: on a line sorted by
# left edges (where the class shift separates the classes) only a short range has to be compared.
#
# NumPy instead of torch, because gathers and searches of this size take half the time.

BLOCK = 128
"""Candidates of each image that are processed in one round."""
PAIRS = 1 << 20
"""Pairs compared at a time, about 40 MB."""
SLACK = 1e-4
"""Margin added to the ranges that are compared; float32 rounding is a hundred times smaller."""


def sweep_kernel(box_M4: Tensor, count_B: Tensor, threshold: float, max_det: int) -> Tensor:
    """Survivors, ascending int64 [D], at most `max_det` of each image; candidates of an image are sorted, best first.

    A box is removed if its IoU with a better survivor of its image, in float32, is greater than `threshold`.
    """
    kept_D = survivors(box_M4.cpu().numpy(), count_B.cpu().numpy(), threshold, max_det)
    return torch.from_numpy(kept_D).to(box_M4.device)


def survivors(box_M4: np.ndarray, count_B: np.ndarray, threshold: float, max_det: int) -> np.ndarray:
    """`sweep_kernel` for arrays."""
    if not np.isfinite(box_M4).all():
        # The IoU with such a box is NaN or 0: it removes no box and is not removed, just like a box without area.
        box_M4 = np.where(np.isfinite(box_M4).all(axis=1, keepdims=True), box_M4, np.float32(0))
    image_M = np.repeat(np.arange(len(count_B)), count_B)
    end_B = count_B.cumsum()
    next_B, kept_B = end_B - count_B, np.zeros_like(count_B)
    line = _SweepLine.for_boxes(box_M4, threshold)
    better = line.sort_boxes(box_M4[:0], image_M[:0], image_M[:0])
    kept = [image_M[:0]]
    while (take_B := np.minimum(end_B - next_B, BLOCK) * (kept_B < max_det)).any():
        row_S, _ = ranges(next_B, take_B)
        block = line.sort_boxes(box_M4[row_S], row_S, image_M[row_S])
        better = better.take(take_B[image_M[better.row_S]] > 0)
        block = block.take(_not_suppressed(block, better, threshold))
        block = block.take(_greedy_in_block(block, threshold))
        better = better.join(block)
        kept.append(block.row_S)
        kept_B += np.bincount(image_M[block.row_S], minlength=len(count_B))
        next_B = next_B + take_B
    return _first_of_each(np.sort(np.concatenate(kept)), kept_B, max_det)


class _Boxes(NamedTuple):
    """Some candidates, sorted by their left edges on a common line on which the images follow each other."""

    row_S: np.ndarray
    """Numbers of the candidates; in an image, a smaller number is better."""

    columns: tuple[np.ndarray, ...]
    """Left, top, right, bottom and area, float32 [S] each."""

    begin_S: np.ndarray
    """Left edge on the line, float64."""

    search_from_S: np.ndarray
    """A box that overlaps this one by more than the threshold has its left edge here or later ..."""

    search_to_S: np.ndarray
    """... and here or earlier."""

    def take(self, which: np.ndarray) -> Self:
        row_S, columns, *line = self
        return type(self)(row_S[which], tuple(column[which] for column in columns), *(edge[which] for edge in line))

    def join(self, more: Self) -> Self:
        columns = tuple(map(_concatenate, self.columns, more.columns))
        line = map(_concatenate, self[2:], more[2:])
        return type(self)(_concatenate(self.row_S, more.row_S), columns, *line)


class _SweepLine(NamedTuple):
    """How far to search on the line for overlapping boxes.

    The overlap of two boxes in x is at most the part of the left box to the right of the other's left edge, and IoU is
    at most that divided by either width. So for an IoU above t the other box begins within (1 - t) of the left box's
    width, and the other's own width is at most 1 / t of it.
    """

    search_left: float
    search_right: float
    """In widths of a box."""

    extent_px: float
    """Extent of all boxes together; images are three times this far apart."""

    @classmethod
    def for_boxes(cls, box_M4: np.ndarray, threshold: float) -> Self:
        low, high = np.min(box_M4, initial=0), np.max(box_M4, initial=0)
        return cls((1 - threshold) / max(threshold, 1e-12) + SLACK, 1 - threshold + SLACK, float(high) - float(low) + 1)

    def sort_boxes(self, box_S4: np.ndarray, row_S: np.ndarray, image_S: np.ndarray) -> _Boxes:
        """Boxes of all images sorted by left edge on one line, on which images lie apart, with the range to search."""
        left_S = box_S4[:, 0].astype(np.float64)
        # Rounding is monotonic: a box in the searched range is still in it after the shift.
        away_S = image_S * (3 * self.extent_px)
        order_S = np.argsort(left_S + away_S)
        left_S, away_S = left_S[order_S], away_S[order_S]
        left, top, right, bottom = columns = np.ascontiguousarray(box_S4[order_S].T)
        width_S = right - left_S
        search_from_S = left_S - np.minimum(width_S * self.search_left, self.extent_px) + away_S
        search_to_S = left_S + width_S * self.search_right + away_S
        area = (right - left) * (bottom - top)
        return _Boxes(row_S[order_S], (*columns, area), left_S + away_S, search_from_S, search_to_S)


def _not_suppressed(block: _Boxes, better: _Boxes, threshold: float) -> np.ndarray:
    """Which boxes of a block are not removed by the survivors of earlier blocks, bool [S]."""
    first_T = np.searchsorted(block.begin_S, better.search_from_S)
    last_T = np.searchsorted(block.begin_S, better.search_to_S, side="right")
    _, suppressed_E = _overlapping(better, block, first_T, last_T, threshold)
    keep_S = np.ones(len(block.row_S), bool)
    keep_S[suppressed_E] = False
    return keep_S


def _greedy_in_block(block: _Boxes, threshold: float) -> np.ndarray:
    """Which boxes of a block greedy suppression within the block keeps, bool [S]."""
    first_S = np.arange(1, len(block.row_S) + 1)
    last_S = np.searchsorted(block.begin_S, block.search_to_S, side="right")
    one_E, other_E = _overlapping(block, block, first_S, last_S, threshold)
    one_wins_E = block.row_S[one_E] < block.row_S[other_E]
    winner_E, loser_E = np.where(one_wins_E, one_E, other_E), np.where(one_wins_E, other_E, one_E)
    return ~_suppressed(winner_E, loser_E, len(block.row_S))


def _overlapping(
    one: _Boxes, other: _Boxes, first_S: np.ndarray, last_S: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs with an IoU above the threshold; box s of `one` is compared with first_S[s] to last_S[s] - 1 of `other`."""
    count_S = np.maximum(last_S - first_S, 0)
    chunk_S = count_S.cumsum() // PAIRS
    ends = np.searchsorted(chunk_S, np.arange(chunk_S[-1] + 1) if len(chunk_S) else [], side="right").tolist()
    found = [(first_S[:0], first_S[:0])]
    for begin, end in zip([0, *ends], ends, strict=False):
        other_P, one_P = ranges(first_S[begin:end], count_S[begin:end])
        one_P += begin
        over_E = _above(one, one_P, other, other_P, threshold)
        found.append((one_P[over_E], other_P[over_E]))
    one_E, other_E = zip(*found, strict=True)
    return np.concatenate(one_E), np.concatenate(other_E)


def _above(one: _Boxes, one_P: np.ndarray, other: _Boxes, other_P: np.ndarray, threshold: float) -> np.ndarray:
    """Positions of the pairs with an IoU above the threshold, in float32."""
    left, top, right, bottom, area = (
        (mine.take(one_P), theirs.take(other_P)) for mine, theirs in zip(one.columns, other.columns, strict=True)
    )
    inter_P = np.minimum(*right) - np.maximum(*left)
    height_P = np.minimum(*bottom) - np.maximum(*top)
    np.maximum(inter_P, 0, out=inter_P)
    inter_P *= np.maximum(height_P, 0, out=height_P)
    union_P = area[0] + area[1]
    union_P -= inter_P
    # Two boxes without area give NaN, which is not above the threshold.
    with np.errstate(invalid="ignore"):
        above_P = inter_P / union_P > np.float32(threshold)
    return np.flatnonzero(above_P)


def _suppressed(winner_E: np.ndarray, loser_E: np.ndarray, num: int) -> np.ndarray:
    """Which boxes are removed, bool [num]: in each pair the winner removes the loser if it survives itself.

    In each round, a box that loses no remaining pair survives; the boxes it removes and all their pairs drop out.
    """
    removed = np.zeros(num, bool)
    while len(winner_E):
        undecided = np.zeros(num, bool)
        undecided[loser_E] = True
        removed[loser_E[~undecided[winner_E]]] = True
        remaining_E = ~(removed[winner_E] | removed[loser_E])
        winner_E, loser_E = winner_E[remaining_E], loser_E[remaining_E]
    return removed


def _first_of_each(kept_D: np.ndarray, kept_B: np.ndarray, limit: int) -> np.ndarray:
    """The first `limit` of each image's rows."""
    position, _ = ranges(kept_B.cumsum() - kept_B, np.minimum(kept_B, limit))
    return kept_D.take(position)


def _concatenate(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.concatenate((one, other))
