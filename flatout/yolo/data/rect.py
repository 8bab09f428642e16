"""Rectangular batches: pictures of like shape together, each batch as small as its pictures allow.

Dimension key:  N pictures   S batches
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class RectBatches(NamedTuple):
    """An order of the pictures, and the input shape of each batch in that order."""

    order_N: np.ndarray
    """int64: pictures by height / width, flat ones first."""
    shape_hw_S2: np.ndarray
    """int64: height and width of the network's input, multiples of the stride."""
    batch_N: np.ndarray
    """int64: batch of each place in the order."""

    def share(self, rank: int, num_ranks: int) -> "RectBatches | None":
        """Every `num_ranks`-th batch, beginning with number `rank`; None if there are fewer than that."""
        mine = [self.order_N[self.batch_N == batch] for batch in range(rank, len(self.shape_hw_S2), num_ranks)]
        if not mine:
            return None
        batch_N = np.repeat(np.arange(len(mine)), [len(batch) for batch in mine])
        return RectBatches(np.concatenate(mine), self.shape_hw_S2[rank::num_ranks], batch_N)


class StepShapes:
    """Shape of the pictures of each step for a `flatout.feed.Plan`, the same in every epoch."""

    def __init__(self, shape_hw_S2: np.ndarray) -> None:
        self._shapes = [(3, height, width) for height, width in shape_hw_S2.tolist()]

    def __call__(self, epoch: int, step: int) -> Mapping[str, tuple[int, ...]]:
        return {"images": self._shapes[step]}


def rect_batches(
    size_wh_N2: np.ndarray, *, batch_size: int, img_size: int, stride: int = 32, pad: float = 0.0
) -> RectBatches:
    """`pad` is 0 for training and 0.5 for validation, where square pictures of 640 px therefore become 672."""
    aspect_N = size_wh_N2[:, 1] / size_wh_N2[:, 0]
    order_N = np.argsort(aspect_N, kind="stable")
    batch_N = np.arange(len(order_N)) // batch_size
    begins_S = np.arange(0, len(order_N), batch_size)
    low_S = np.minimum.reduceat(aspect_N[order_N], begins_S)
    high_S = np.maximum.reduceat(aspect_N[order_N], begins_S)
    height_S = np.where(high_S < 1, high_S, 1.0)
    width_S = np.where(low_S > 1, 1 / low_S, 1.0)
    relative_S2 = np.stack((height_S, width_S), 1)
    shape_S2 = np.ceil(relative_S2 * img_size / stride + pad).astype(np.int64) * stride
    return RectBatches(order_N, shape_S2, batch_N)
