"""Numbers for a few samples at a time, at the price of many: drawn a block ahead and kept.

Drawing is a hundred small array operations, whether for one sample or for sixteen. Every sample's numbers follow from
its position alone, so those of its neighbours may as well be drawn with it.

Dimension key:  M samples
"""

from collections.abc import Callable

import numpy as np

BLOCK = 16
"""Positions that are drawn together; whoever asks for half as many or more gets just those."""

Numbers = dict[str, np.ndarray]
Draw = Callable[[int, int, np.ndarray], Numbers]
"""(seed, epoch, positions [M]) -> arrays [M, ...], row by row a function of the position."""


class Ahead:
    """Stands for a `Draw`. May be used by several threads, and pickled with what it draws."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._kept: tuple[tuple[int, int, int], Numbers] | None = None

    def __call__(self, seed: int, epoch: int, positions_M: np.ndarray) -> Numbers:
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
            # In one assignment, so that another thread sees all of it or nothing.
            kept = self._kept = (seed, epoch, begin), block
        return {name: array[first - begin : last - begin + 1] for name, array in kept[1].items()}
