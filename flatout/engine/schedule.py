"""What a schedule says about one iteration: a pure function of where the training stands.

No state means nothing to save: a resumed run asks for the same iteration and gets the same answer.
"""

from typing import NamedTuple, Protocol


class Knobs(NamedTuple):
    """The settings of one iteration."""

    lrs: tuple[float, ...]
    """One per parameter group, in the optimizer's order."""
    momentum: float | None
    """None: leave the optimizer's own alone."""
    steps: bool
    """Does the optimizer step after this iteration's backward, or does the gradient go on growing?"""


class Schedule(Protocol):
    """Knobs of the iteration `epoch * steps_per_epoch + step`; pure."""

    def __call__(self, epoch: int, step: int) -> Knobs: ...
