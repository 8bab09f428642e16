"""Learning rate and focal gamma by epoch: pure functions, so nothing of them is saved."""

import math

from flatout.engine.schedule import Knobs

DROPS = (0.8, 0.9)
"""Shares of the epochs after which the rate falls."""
DROP = 0.2


def learning_rate(lr: float, epoch: int, epochs: int) -> float:
    """A fifth from epoch int(0.8 T) on, and a fifth of that from int(0.9 T) on."""
    return lr * DROP ** sum(epoch >= int(share * epochs) for share in DROPS)


def focal_gamma(start: float, end: float, epoch: int, epochs: int) -> float:
    """From `start` towards `end` along half a wave; `end` itself would come one epoch after the last."""
    return start + (end - start) * (1 - math.cos(math.pi * epoch / epochs)) / 2


class StepwiseSchedule:
    """Knobs for one parameter group; the optimizer steps after every batch."""

    def __init__(self, lr: float, epochs: int) -> None:
        self._lr, self._epochs = lr, epochs

    def __call__(self, epoch: int, step: int) -> Knobs:
        return Knobs((learning_rate(self._lr, epoch, self._epochs),), None, steps=True)
