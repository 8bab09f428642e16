"""One line of results.txt per epoch, in the 15 columns that YOLOv7's tools read."""

from collections.abc import Sequence
from typing import NamedTuple


class EpochResult(NamedTuple):
    """What an epoch is remembered by."""

    epoch: int
    epochs: int
    memory_gb: float
    """Most GPU memory held, in units of 10^9 bytes."""
    mean_losses: Sequence[float]
    """box, obj, cls, total: means over the epoch."""
    num_targets: int
    """In the last batch."""
    width_px: int
    """Of the last batch."""
    scores: Sequence[float]
    """P, R, mAP@.5, mAP@.5:.95, then the validation losses box, obj, cls."""


def results_line(result: EpochResult) -> str:
    """The line, with its line break."""
    head = f"{f'{result.epoch}/{result.epochs - 1}':>10}{f'{result.memory_gb:.3g}G':>10}"
    numbers = (*result.mean_losses, result.num_targets, result.width_px, *result.scores)
    return head + "".join(f"{float(number):10.4g}" for number in numbers) + "\n"
