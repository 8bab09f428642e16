"""Another picture size for every batch: half to one and a half times the training size, in steps of the grid."""

import math

import numpy as np

from flatout.feed.philox import Purpose, keyed_uniform


def sizes_from(image_size: int, grid: int) -> range:
    """Numbers a size is drawn from, all equally likely; `size_of_draw` rounds one to the grid."""
    return range(image_size // 2, image_size * 3 // 2 + grid)


def size_of_draw(draw: int, grid: int) -> int:
    """Longer side of the batch, in pixels."""
    return draw // grid * grid


def draw_size(image_size: int, grid: int, *, seed: int, epoch: int, step: int) -> int:
    """Longer side of one step's batch, a pure function of the step: resuming and ranks agree on it."""
    draws = sizes_from(image_size, grid)
    (uniform,) = keyed_uniform(seed, epoch, np.array([step]), 1, purpose=Purpose.STEP)[0]
    return size_of_draw(draws[int(uniform * len(draws))], grid)


def scaled_shape(height: int, width: int, *, size: int, grid: int) -> tuple[int, int]:
    """Height and width of a batch [height, width] whose longer side becomes `size`, each a multiple of the grid."""
    factor = size / max(height, width)
    if factor == 1:
        return height, width
    return math.ceil(height * factor / grid) * grid, math.ceil(width * factor / grid) * grid
