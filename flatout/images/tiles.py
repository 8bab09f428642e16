"""The grid of overlapping tiles over an image, and which tile owns each pixel.

    side, tile --> number of tiles --> first pixel of each, evenly spread: the first tile begins with the image, the
                   last one ends with it, and none is smaller than the tile unless the image is

Pure arithmetic on plain numbers: no files, no memory per tile.

Dimension key:  T tiles of an image (rows x columns, columns fastest)   P tile side   H W image   L axis
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np

from flatout.errors import ConfigError


def tile_starts(length: int, tile: int, min_tiles: int = 2) -> list[int] | None:
    """First pixel of each tile along one axis; the last tile ends with the axis. None if no tile fits."""
    if length < tile:
        return None
    if length == tile:
        return [0]
    count = max(min_tiles, -(-length // tile))
    if count < 2:
        raise ConfigError(f"min_tiles={min_tiles}: it must be 2 or more.")
    return [index * (length - tile) // (count - 1) for index in range(count)]


def tiles_for_overlap(length: int, tile: int, overlap: int) -> int:
    """`min_tiles` with which neighbours share at least `overlap` pixels."""
    overlap = min(overlap, tile - 1)
    return max(2, -(-(length - overlap) // (tile - overlap)))


def tile_cuts(starts: list[int], length: int, tile: int) -> list[int]:
    """Borders between the pixels that belong to neighbouring tiles: tile k owns [cuts[k], cuts[k + 1])."""
    between = [(left + right + tile) // 2 for left, right in pairwise(starts)]
    return [0, *between, length]


@dataclass(frozen=True)
class TileGrid:
    """The tiles of an image: rows and columns of equal tiles, numbered row by row."""

    shape_hw: tuple[int, int]
    tile_hw: tuple[int, int]
    min_tiles_yx: tuple[int, int]

    @classmethod
    def overlapping(cls, shape_hw: tuple[int, int], tile: int, overlap: float) -> Self:
        """Square tiles that share at least this part of their side with their neighbours.

        Along an axis that is shorter than the tile, there is one tile of the length of the axis.
        """
        if tile < 1 or not 0 <= overlap < 1:
            raise ConfigError(f"tiles of {tile} px with an overlap of {overlap}: use 1 px or more, and 0 to below 1.")
        shared = -int(-(tile * overlap) // 1)  # rounded up
        tile_hw = min(tile, shape_hw[0]), min(tile, shape_hw[1])
        counts = [tiles_for_overlap(side, cut, shared) for side, cut in zip(shape_hw, tile_hw, strict=True)]
        return cls(shape_hw, tile_hw, (counts[0], counts[1]))

    @cached_property
    def ys(self) -> list[int]:
        return tile_starts(self.shape_hw[0], self.tile_hw[0], self.min_tiles_yx[0]) or []

    @cached_property
    def xs(self) -> list[int]:
        return tile_starts(self.shape_hw[1], self.tile_hw[1], self.min_tiles_yx[1]) or []

    @property
    def per_image(self) -> int:
        return len(self.ys) * len(self.xs)

    @cached_property
    def window_T4(self) -> np.ndarray:
        """Left, top, right and bottom of every tile, int64: pixels left <= x < right belong to it."""
        y_T, x_T = np.repeat(self.ys, len(self.xs)), np.tile(self.xs, len(self.ys))
        height, width = self.tile_hw
        return np.stack((x_T, y_T, x_T + width, y_T + height), 1).astype(np.int64)

    @cached_property
    def y_cuts(self) -> list[int]:
        return tile_cuts(self.ys, self.shape_hw[0], self.tile_hw[0])

    @cached_property
    def x_cuts(self) -> list[int]:
        return tile_cuts(self.xs, self.shape_hw[1], self.tile_hw[1])

    def owners(self) -> np.ndarray:
        """For every pixel, the index into the flattened tiles [T, P, P] that it is taken from; int64 [H, W]."""
        row_H, y_H = _owned(self.ys, self.y_cuts)
        column_W, x_W = _owned(self.xs, self.x_cuts)
        tile_HW = row_H[:, None] * len(self.xs) + column_W
        height, width = self.tile_hw
        return np.asarray((tile_HW * height + y_H[:, None]) * width + x_W)


def _owned(starts: list[int], edges: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """For every pixel of an axis, the tile that owns it and its position in that tile, int64 [L] each."""
    tile_L = np.repeat(np.arange(len(starts)), np.diff(edges))
    return tile_L, np.arange(edges[-1]) - np.asarray(starts)[tile_L]
