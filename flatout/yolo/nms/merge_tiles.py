"""Detections of the tiles of an image -> detections of the image: boxes cut by tile borders are dropped or joined.

    boxes of each tile, after its own NMS, in pixels of the image
      -> cut boxes that a neighbour sees less cut are dropped
      -> cut boxes of objects longer than the overlap are joined with their continuation in the next tile
      -> one NMS over the image, class by class

A box is cut if it reaches a border of its tile that is not a border of the image. Beyond that border lies a
neighbour, which begins one overlap earlier. If the box begins within that overlap, the neighbour sees the object from
its beginning on, and the box is dropped, whatever the scores. If it spans the overlap, the object is longer than the
overlap and cut in both tiles; the two boxes are joined if they have the same class and agree along the border. So an
object not longer than the overlap is found by a tile that sees it whole, and a longer one is put together.

Dimension key:  D boxes   T tiles of the image   P pairs of boxes   G groups of joined boxes   4 left top right bottom
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from flatout.images import TileGrid
from flatout.yolo.boxes import best_first, pairs_of_equal_key
from flatout.yolo.nms.greedy import float32_at_most, sweep_kernel

REACHES = 0.25
"""A box reaches a border if it ends closer to it than this part of the overlap; at least MIN_REACH_PX. Boxes of cut
objects do not end exactly at the border, and the neighbour sees an object so close to it with more of its surroundings.
Chosen on scenes that bench/tiles.py does not use, where 0.05 of it lost half a point of mAP."""
MIN_REACH_PX = 2.0
MIN_AGREEMENT = 0.5
"""Two parts of an object are joined if, along the border, their common length is at least this part of their total."""
COVERED = 0.8
"""A cut box is dropped if a box of the same class from the full view covers at least this part of it."""


class TileRows(NamedTuple):
    """Boxes of one image from all its tiles, on the host."""

    row_D6: np.ndarray
    """float32: left, top, right, bottom in pixels of the image, score, class."""
    tile_D: np.ndarray
    """int64: number of the tile; -1 for the full view."""


def merge_tiles(found: TileRows, grid: TileGrid, *, iou_thres: float, agnostic: bool = False) -> np.ndarray:
    """The detections of the image, highest score first: float32 [n, 6], rows as in `TileRows`."""
    row_D6, tile_D = found
    # A tile sees smaller objects whole, and larger than the full view does.
    longest_D = (row_D6[:, 2:4] - row_D6[:, :2]).max(1, initial=0)
    is_full_D = (tile_D < 0) & (longest_D > shared_px(grid))
    is_tile_D = tile_D >= 0
    full_M6, row_D6, tile_D = row_D6[is_full_D], row_D6[is_tile_D], tile_D[is_tile_D]
    cuts = find_cuts(row_D6[:, :4], tile_D, grid)
    is_kept_D = ~cuts.is_seen_better_D
    row_D6, is_part_D = join_parts(row_D6[is_kept_D], tile_D[is_kept_D], cuts.is_cut_D4[is_kept_D], len(grid.xs))
    if len(full_M6):
        is_part_D[is_part_D] = _covered(row_D6[is_part_D], full_M6)
        row_D6 = np.concatenate((row_D6[~is_part_D], full_M6))
    return suppress(row_D6, iou_thres=iou_thres, agnostic=agnostic)


def shared_px(grid: TileGrid) -> float:
    """The smallest overlap of two neighbours: objects up to this long are whole in some tile. inf for a single tile."""
    return min(_overlap_px(grid.ys, grid.tile_hw[0]), _overlap_px(grid.xs, grid.tile_hw[1]))


def _overlap_px(starts: list[int], tile: int) -> float:
    return min((start + tile - after for start, after in pairwise(starts)), default=float("inf"))


# Cut boxes


class Cuts(NamedTuple):
    """How tile borders cut boxes."""

    is_cut_D4: np.ndarray
    """bool: whether the box is cut at the left, top, right, bottom."""
    is_seen_better_D: np.ndarray
    """bool: whether a neighbour sees the object from its beginning on."""


def find_cuts(box_D4: np.ndarray, tile_D: np.ndarray, grid: TileGrid) -> Cuts:
    """Which boxes are cut at which inner border of their tile, and which of them a neighbour sees better.

    Boxes are x1, y1, x2, y2 in pixels of the image; `tile_D` is the number of each box's tile, row by row.
    """
    row_D, column_D = np.divmod(tile_D, len(grid.xs))
    is_cut_D4 = np.zeros((len(box_D4), 4), bool)
    is_seen_better_D = np.zeros(len(box_D4), bool)
    for axis, (starts, tile, at_D) in enumerate(
        ((grid.xs, grid.tile_hw[1], column_D), (grid.ys, grid.tile_hw[0], row_D))
    ):
        if len(starts) == 1:
            continue
        start_L = np.asarray(starts, np.float32)
        reach = max(MIN_REACH_PX, REACHES * _overlap_px(starts, tile))
        low_D, high_D = box_D4[:, axis], box_D4[:, axis + 2]
        is_cut_D4[:, axis] = (at_D > 0) & (low_D <= start_L[at_D] + reach)
        is_cut_D4[:, axis + 2] = (at_D < len(starts) - 1) & (high_D >= start_L[at_D] + tile - reach)
        end_before_D = start_L[np.maximum(at_D - 1, 0)] + tile
        begin_after_D = start_L[np.minimum(at_D + 1, len(starts) - 1)]
        is_seen_better_D |= is_cut_D4[:, axis] & (high_D < end_before_D - reach)
        is_seen_better_D |= is_cut_D4[:, axis + 2] & (low_D > begin_after_D + reach)
    return Cuts(is_cut_D4, is_seen_better_D)


def join_parts(
    row_D6: np.ndarray, tile_D: np.ndarray, is_cut_D4: np.ndarray, num_columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Join parts of objects across borders: rows with joined boxes at the end, and which rows are cut and not joined.

    A joined box surrounds its parts and has their highest score. Each part is joined with at most one other at each
    border: the one with which it agrees best.
    """
    group_D = np.arange(len(row_D6))
    for axis, step in ((0, 1), (1, num_columns)):
        first_P, second_P = _continuations(row_D6, tile_D, is_cut_D4, axis, step)
        for first, second in zip(first_P.tolist(), second_P.tolist(), strict=True):
            group_D[group_D == group_D[second]] = group_D[first]
    members_D = np.bincount(group_D, minlength=len(row_D6))[group_D] > 1 if len(group_D) else np.zeros(0, bool)
    rows = [row_D6[~members_D]]
    for group in np.unique(group_D[members_D]).tolist():
        own = row_D6[group_D == group]
        low, high = own[:, :2].min(0), own[:, 2:4].max(0)
        rows.append(np.concatenate((low, high, own[own[:, 4].argmax(), 4:]))[None].astype(np.float32))
    joined = np.concatenate(rows)
    is_part_D = np.zeros(len(joined), bool)
    is_part_D[: int((~members_D).sum())] = is_cut_D4[~members_D].any(1)
    return joined, is_part_D


def _continuations(
    row_D6: np.ndarray, tile_D: np.ndarray, is_cut_D4: np.ndarray, axis: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of boxes that continue each other across a border between a tile and the one `step` later, int64 [P] each.

    Both prefer each other over all others of their class at that border.
    """
    before, after = np.flatnonzero(is_cut_D4[:, axis + 2]), np.flatnonzero(is_cut_D4[:, axis])
    if not len(before) or not len(after):
        return before[:0], after[:0]
    num_classes = int(row_D6[:, 5].max()) + 1
    keys = [
        torch.from_numpy((tile_D[rows] + shift) * num_classes + row_D6[rows, 5].astype(np.int64))
        for rows, shift in ((before, step), (after, 0))
    ]
    a_P, b_P = (each.numpy() for each in pairs_of_equal_key(*keys))
    low_D, high_D = row_D6[:, 1 - axis], row_D6[:, 3 - axis]
    first_P, second_P = before[a_P], after[b_P]
    common_P = np.minimum(high_D[first_P], high_D[second_P]) - np.maximum(low_D[first_P], low_D[second_P])
    total_P = np.maximum(high_D[first_P], high_D[second_P]) - np.minimum(low_D[first_P], low_D[second_P])
    agreement_P = common_P / np.maximum(total_P, 1e-6)
    best_A, best_B = np.zeros(len(before), np.float32), np.zeros(len(after), np.float32)
    np.maximum.at(best_A, a_P, agreement_P)
    np.maximum.at(best_B, b_P, agreement_P)
    is_mutual_P = (agreement_P >= MIN_AGREEMENT) & (agreement_P == best_A[a_P]) & (agreement_P == best_B[b_P])
    return first_P[is_mutual_P], second_P[is_mutual_P]


def _covered(row_D6: np.ndarray, full_M6: np.ndarray) -> np.ndarray:
    """Whether a box of the full view with the same class covers most of a box, bool [D]."""
    low_DM2 = np.maximum(row_D6[:, None, :2], full_M6[None, :, :2])
    high_DM2 = np.minimum(row_D6[:, None, 2:4], full_M6[None, :, 2:4])
    common_DM = np.maximum(high_DM2 - low_DM2, 0).prod(2)
    area_D = np.maximum(row_D6[:, 2:4] - row_D6[:, :2], 1e-6).prod(1)
    is_same_DM = row_D6[:, None, 5] == full_M6[None, :, 5]
    return np.asarray(((common_DM >= COVERED * area_D[:, None]) & is_same_DM).any(1))


# NMS over the image


def suppress(row_D6: np.ndarray, *, iou_thres: float, agnostic: bool) -> np.ndarray:
    """Rows that survive greedy suppression, highest score first.

    Every class is suppressed as if it were an image of its own: the shift by class of `non_max_suppression` is too
    small for images of more than 4096 px, and a larger one would make float32 coordinates coarse.
    """
    if not len(row_D6):
        return row_D6
    row = torch.from_numpy(np.ascontiguousarray(row_D6))
    class_D = torch.zeros(len(row), dtype=torch.int64) if agnostic else row[:, 5].long()
    num_classes = int(class_D.max()) + 1
    row = row[best_first(class_D, row[:, 4], num_classes)]
    count_C = torch.bincount(class_D, minlength=num_classes)
    kept_D = sweep_kernel(row[:, :4].contiguous(), count_C, float32_at_most(iou_thres), len(row))
    kept = row[kept_D]
    return kept[best_first(torch.zeros(len(kept), dtype=torch.int64), kept[:, 4], 1)].numpy()
