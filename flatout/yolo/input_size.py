"""Which input sizes can a network take?"""

import logging

logger = logging.getLogger(__name__)

LEAST_GRID = 32
"""Sides are multiples of at least this, whatever the strides are."""


def rounded_up(size: int, grid: int) -> int:
    """A size that the network can take; a word in the log where it is another one."""
    fits = -(-size // grid) * grid
    if fits != size:
        logger.warning("--img-size %d is no multiple of the largest stride %d: %d is used.", size, grid, fits)
    return fits
