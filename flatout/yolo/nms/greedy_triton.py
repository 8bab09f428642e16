"""Greedy suppression on a CUDA device: one program per image, all images in one launch.

A program processes the candidates of its image in blocks, best first. It compares a block with the survivors so far,
then with itself, and ends when the image has `max_det` survivors or no candidates left. Memory holds the boxes of the
survivors; nothing grows with the square of the number of candidates.

Dimension key:  B images   M candidates, best first in each image   K = max_det survivors of an image
                ROWS candidates of a block
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8
ROWS = 64
"""Candidates of a block; compared in tiles of ROWS x ROWS."""


def greedy_kernel(box_M4: Tensor, count_B: Tensor, threshold: float, max_det: int) -> Tensor:
    """Survivors, ascending int64 [D], at most `max_det` of each image; candidates of an image are sorted, best first.

    A box is removed if its IoU with a better survivor of its image, in float32, is greater than `threshold`.
    """
    num_images = len(count_B)
    box_M4, end_B = box_M4.contiguous(), count_B.cumsum(0)
    kept_BK = torch.full((num_images, max_det), -1, dtype=torch.int64, device=box_M4.device)
    scratch_BK4 = torch.empty((num_images, max_det, 4), device=box_M4.device)
    # Without fused multiply-add, so that every product is rounded, as by torch and on the CPU.
    options: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": WARPS}
    _greedy[(num_images,)](box_M4, count_B, end_B, kept_BK, scratch_BK4, threshold, max_det, ROWS=ROWS, **options)
    return kept_BK[kept_BK >= 0]


@triton.jit
def _overlap(
    left: tl.tensor,
    top: tl.tensor,
    right: tl.tensor,
    bottom: tl.tensor,
    other_left: tl.tensor,
    other_top: tl.tensor,
    other_right: tl.tensor,
    other_bottom: tl.tensor,
    threshold: tl.tensor,
) -> tl.tensor:
    """Whether boxes [R, 1] and boxes [1, T] have an IoU above the threshold, [R, T]."""
    width = tl.maximum(tl.minimum(right, other_right) - tl.maximum(left, other_left), 0.0)
    height = tl.maximum(tl.minimum(bottom, other_bottom) - tl.maximum(top, other_top), 0.0)
    inter = width * height
    area = (right - left) * (bottom - top)
    other_area = (other_right - other_left) * (other_bottom - other_top)
    return tl.div_rn(inter, area + other_area - inter) > threshold


@triton.jit
def _greedy(
    box_ptr: tl.tensor,
    count_ptr: tl.tensor,
    end_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    threshold: tl.tensor,
    max_det: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    image = tl.program_id(0)
    count = tl.load(count_ptr + image)
    first = tl.load(end_ptr + image) - count
    kept_ptr += image * max_det
    scratch_ptr += image * max_det * 4
    row = tl.arange(0, ROWS)
    num_kept = 0
    begin = 0
    while (begin < count) & (num_kept < max_det):
        at = box_ptr + (first + begin + row) * 4
        inside = begin + row < count
        left = tl.load(at, mask=inside, other=0.0)
        top = tl.load(at + 1, mask=inside, other=0.0)
        right = tl.load(at + 2, mask=inside, other=0.0)
        bottom = tl.load(at + 3, mask=inside, other=0.0)

        alive = inside.to(tl.int32)
        tile = 0
        while tile < num_kept:
            there = tile + row < num_kept
            other = scratch_ptr + (tile + row) * 4
            over = _overlap(
                left[:, None],
                top[:, None],
                right[:, None],
                bottom[:, None],
                tl.load(other, mask=there, other=0.0)[None, :],
                tl.load(other + 1, mask=there, other=0.0)[None, :],
                tl.load(other + 2, mask=there, other=0.0)[None, :],
                tl.load(other + 3, mask=there, other=0.0)[None, :],
                threshold,
            )
            alive = alive & (1 - tl.max((over & there[None, :]).to(tl.int32), axis=1))
            tile += ROWS

        # beats[i, j]: box i, still alive, would remove the worse box j.
        over = _overlap(
            left[:, None],
            top[:, None],
            right[:, None],
            bottom[:, None],
            left[None, :],
            top[None, :],
            right[None, :],
            bottom[None, :],
            threshold,
        )
        beats = (over & (row[:, None] < row[None, :])).to(tl.int32)
        # The greedy result is the unique set of boxes that no box of the set removes, and that removes all others. Each
        # iteration decides at least the best undecided box.
        stays = alive
        changed = 1
        while changed > 0:
            beaten = tl.max(beats * stays[:, None], axis=0)
            now = alive & (1 - beaten)
            changed = tl.max(now ^ stays, axis=0)
            stays = now

        place = num_kept + tl.cumsum(stays, axis=0) - 1
        write = (stays > 0) & (place < max_det)
        tl.store(kept_ptr + place, first + begin + row, mask=write)
        to = scratch_ptr + place * 4
        tl.store(to, left, mask=write)
        tl.store(to + 1, top, mask=write)
        tl.store(to + 2, right, mask=write)
        tl.store(to + 3, bottom, mask=write)
        # Other threads of this program read the survivors in the next iteration.
        tl.debug_barrier()
        num_kept = tl.minimum(num_kept + tl.sum(stays, axis=0), max_det)
        begin += ROWS
