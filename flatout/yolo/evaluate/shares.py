"""One evaluation by several ranks: they take turns at the batches, and one puts everything back in order.

    batches 0 1 2 3 4 ... --dealt--> rank 0: 0 2 4   rank 1: 1 3  --Share each--> in_turn --> as if by one

Whole batches are dealt, never parts: the same pictures go through the network together, at the same shape, so that the
scores and losses are those of one rank, to the last bit where its arithmetic is.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.metrics import Evaluator
from flatout.yolo.metrics.stream import Matches

T = TypeVar("T")


class Share(NamedTuple):
    """What one rank has found: plain arrays on the host, batch by batch."""

    matches: list[tuple[np.ndarray, ...]]
    losses: list[np.ndarray]
    num_images: int
    confusion: np.ndarray | None


Join = Callable[[Share], Sequence[Share]]
"""One rank's share in; those of all out, in the order of the ranks. Empty for ranks that do not sum up."""


def share_of(evaluator: Evaluator, losses: Sequence[Tensor]) -> Share:
    """Everything on the host; it waits for the device."""
    return Share(
        [tuple(column.cpu().numpy() for column in batch) for batch in evaluator.batches],
        [loss.cpu().numpy() for loss in losses],
        evaluator.num_images,
        None if evaluator.confusion is None else evaluator.confusion.counts().numpy(),
    )


def put_together(shares: Sequence[Share], evaluator: Evaluator) -> list[Tensor]:
    """Let `evaluator` hold what all have found; returns the losses of all batches, in order."""
    evaluator.batches = [
        Matches(*map(torch.from_numpy, batch)) for batch in in_turn([share.matches for share in shares])
    ]
    evaluator.num_images = sum(share.num_images for share in shares)
    if evaluator.confusion is not None:
        evaluator.confusion.hold([share.confusion for share in shares if share.confusion is not None])
    return [torch.from_numpy(loss) for loss in in_turn([share.losses for share in shares])]


def in_turn(dealt: Sequence[Sequence[T]]) -> list[T]:
    """The cards in the order they were dealt in: the first of each, then the second of each ..."""
    rounds = max(map(len, dealt), default=0)
    return [hand[number] for number in range(rounds) for hand in dealt if number < len(hand)]
