"""A large frame in tiles without seams: neighbours fade into each other, and the border of the picture does not fade.

Dimension key:  n side of the picture   t side of a tile
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError


def tile_starts(n: int, tile: int, overlap: int) -> list[int]:
    """Where tiles begin; the last one is shifted back to end with the picture."""
    if not 0 <= overlap < tile:
        raise ConfigError(f"tile overlap {overlap} must be from 0 to below the tile size {tile}.")
    if n <= tile:
        return [0]
    starts = list(range(0, n - tile, tile - overlap))
    return [*starts, n - tile]


def tile_weights(n: int, tile: int, overlap: int) -> list[np.ndarray]:
    """Weights of each tile along an axis, float64 [t]: rising (i + 1/2) / overlap on sides that have a neighbour."""
    starts = tile_starts(n, tile, overlap)
    length = min(n, tile)
    weights = []
    for number, start in enumerate(starts):
        weight_t = np.ones(length)
        if number > 0:
            shared = starts[number - 1] + length - start
            weight_t[:shared] *= (np.arange(shared) + 0.5) / shared if shared else 1
        if number + 1 < len(starts):
            shared = start + length - starts[number + 1]
            if shared:
                weight_t[length - shared :] *= ((np.arange(shared) + 0.5) / shared)[::-1]
        weights.append(weight_t)
    return weights


Work = Callable[[Tensor, Tensor], Tensor]


def in_tiles(work: Work, blur: Tensor, spikes: Tensor, *, tile: int, overlap: int, step: tuple[int, int]) -> Tensor:
    """`work` on [N, L, 3, H, W] and its spikes [N, L, C, H / r, W / r], tile by tile if a side exceeds the tile.

    `step`: RGB pixels per axis at which a tile may begin so that its spikes are exact; tiles are rounded to it.
    """
    height, width = blur.shape[-2:]
    if not tile or (height <= tile and width <= tile):
        return work(blur, spikes)
    total = torch.zeros(blur.shape, device=blur.device)
    weight_sum = torch.zeros(height, width, device=blur.device)
    ratio = (spikes.shape[-2] / height, spikes.shape[-1] / width)
    axes = [_axis(n, tile, overlap, b) for n, b in zip((height, width), step, strict=True)]
    for top, weight_y in axes[0]:
        for left, weight_x in axes[1]:
            bottom, right = top + len(weight_y), left + len(weight_x)
            part = spikes[
                ..., round(top * ratio[0]) : round(bottom * ratio[0]), round(left * ratio[1]) : round(right * ratio[1])
            ]
            weight = torch.from_numpy(np.outer(weight_y, weight_x)).to(total)
            done = work(blur[..., top:bottom, left:right], part)
            total[..., top:bottom, left:right] += done * weight
            weight_sum[top:bottom, left:right] += weight
    return total / weight_sum


def _axis(n: int, tile: int, overlap: int, step: int) -> list[tuple[int, np.ndarray]]:
    """(start, weights) of the tiles of an axis, starts and sizes multiples of `step` where n is one."""
    tile, overlap = max(step, tile // step * step), overlap // step * step
    return list(zip(tile_starts(n, tile, overlap), tile_weights(n, tile, overlap), strict=True))
