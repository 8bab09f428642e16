"""The grid of patches in an image, and stitching of their results. Computed by arithmetic: no memory per patch.

    sample number -> image, row, column -> y, x          tiles --owner--> image: every pixel from exactly one patch

Dimension key:  M samples   P patch side   T tiles of an image (rows x columns, columns fastest)   H W image   L axis
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from flatout.errors import ConfigError

MIN_OVERLAP = 16
"""Pixels that neighbouring patches share by default: results are better away from the edge of a patch."""


def positions(length: int, patch: int, min_patches: int = 2) -> list[int] | None:
    """First pixel of each patch along one axis; the last patch ends with the axis. None if no patch fits."""
    if length < patch:
        return None
    if length == patch:
        return [0]
    count = max(min_patches, -(-length // patch))
    if count < 2:
        raise ConfigError(f"min_patches={min_patches}: it must be 2 or more.")
    return [index * (length - patch) // (count - 1) for index in range(count)]


def patches_for_overlap(length: int, patch: int, overlap: int = MIN_OVERLAP) -> int:
    """`min_patches` with which neighbours share at least `overlap` pixels, or one less because of rounding."""
    overlap = min(overlap, patch - 1)
    return max(2, -(-(length - overlap) // (patch - overlap)))


def cuts(starts: list[int], length: int, patch: int) -> list[int]:
    """Borders between the pixels that belong to neighbouring patches: patch k owns [cuts[k], cuts[k + 1])."""
    between = [(left + right + patch) // 2 for left, right in pairwise(starts)]
    return [0, *between, length]


@dataclass(frozen=True)
class Grid:
    """The patch grid of a run, the same for every image because all images have one size."""

    shape_hw: tuple[int, int]
    patch_hw: tuple[int, int]
    min_patches_yx: tuple[int, int]

    @classmethod
    def over(cls, shape_hw: tuple[int, int], patch: int, min_patches: tuple[int, int] | None = None) -> "Grid":
        """Square patches; without `min_patches` (rows, columns), enough that neighbours share MIN_OVERLAP pixels."""
        wanted = min_patches or tuple(patches_for_overlap(side, patch) for side in shape_hw)
        return cls(shape_hw, (patch, patch), (wanted[0], wanted[1]))

    def __post_init__(self) -> None:
        if any(side < patch for side, patch in zip(self.shape_hw, self.patch_hw, strict=True)):
            height, width = self.shape_hw
            raise ConfigError(
                f"images of {height} x {width} are smaller than the patch of {self.patch_hw[0]} x {self.patch_hw[1]}: "
                "use a smaller --patch_size."
            )

    @cached_property
    def ys(self) -> list[int]:
        return positions(self.shape_hw[0], self.patch_hw[0], self.min_patches_yx[0]) or []

    @cached_property
    def xs(self) -> list[int]:
        return positions(self.shape_hw[1], self.patch_hw[1], self.min_patches_yx[1]) or []

    @property
    def per_image(self) -> int:
        return len(self.ys) * len(self.xs)

    def locate(self, samples_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Image number, y and x of the patch of each sample, int64 [M] each."""
        image_M, tile_M = np.divmod(np.asarray(samples_M, np.int64), self.per_image)
        row_M, column_M = np.divmod(tile_M, len(self.xs))
        return image_M, np.asarray(self.ys)[row_M], np.asarray(self.xs)[column_M]

    @cached_property
    def y_cuts(self) -> list[int]:
        return cuts(self.ys, self.shape_hw[0], self.patch_hw[0])

    @cached_property
    def x_cuts(self) -> list[int]:
        return cuts(self.xs, self.shape_hw[1], self.patch_hw[1])

    def owners(self) -> np.ndarray:
        """For every pixel, the index into the flattened tiles [T, P, P] that it is taken from; int64 [H, W]."""
        row_H, y_H = _owned(self.ys, self.y_cuts)
        column_W, x_W = _owned(self.xs, self.x_cuts)
        tile_HW = row_H[:, None] * len(self.xs) + column_W
        height, width = self.patch_hw
        return np.asarray((tile_HW * height + y_H[:, None]) * width + x_W)


def stitch_owner(tiles_TPP: np.ndarray, grid: Grid) -> np.ndarray:
    """Stitch tiles into [H, W]: every pixel is taken from the tile that owns it."""
    return np.asarray(np.ascontiguousarray(tiles_TPP).reshape(-1)[grid.owners()])


def stitch_average(tiles_TPP: np.ndarray, grid: Grid) -> np.ndarray:
    """Stitch tiles into [H, W]: every pixel is the mean over all tiles that cover it, computed in float64."""
    total_HW, count_HW = np.zeros(grid.shape_hw), np.zeros(grid.shape_hw)
    height, width = grid.patch_hw
    corners = [(y, x) for y in grid.ys for x in grid.xs]
    for tile_PP, (y, x) in zip(tiles_TPP, corners, strict=True):
        total_HW[y : y + height, x : x + width] += tile_PP
        count_HW[y : y + height, x : x + width] += 1
    return np.asarray(total_HW / count_HW)


def _owned(starts: list[int], edges: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """For every pixel of an axis, the patch that owns it and its position in that patch, int64 [L] each."""
    patch_L = np.repeat(np.arange(len(starts)), np.diff(edges))
    return patch_L, np.arange(edges[-1]) - np.asarray(starts)[patch_L]
