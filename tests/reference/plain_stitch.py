"""Stitching of tiles in NumPy: what the stitching on the device must equal.

Dimension key:  T tiles of an image   P tile side   H W image
"""

import numpy as np

from flatout.images import TileGrid


def stitch_owner(tiles_TPP: np.ndarray, grid: TileGrid) -> np.ndarray:
    """Stitch tiles into [H, W]: every pixel is taken from the tile that owns it."""
    return np.asarray(np.ascontiguousarray(tiles_TPP).reshape(-1)[grid.owners()])


def stitch_average(tiles_TPP: np.ndarray, grid: TileGrid) -> np.ndarray:
    """Stitch tiles into [H, W]: every pixel is the mean over all tiles that cover it, computed in float64."""
    total_HW, count_HW = np.zeros(grid.shape_hw), np.zeros(grid.shape_hw)
    for tile_PP, (left, top, right, bottom) in zip(tiles_TPP, grid.window_T4.tolist(), strict=True):
        total_HW[top:bottom, left:right] += tile_PP
        count_HW[top:bottom, left:right] += 1
    return np.asarray(total_HW / count_HW)
