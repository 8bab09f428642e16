"""Switch the best remedy on, measure again, keep or revert, and say how good the prediction was."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from flatout.profiler import Profile, Remedy, number

WORTH_KEEPING = 1.02


class Training(Protocol):
    """A training that can be looked at, and changed."""

    def with_switch(self, switch: Mapping[str, Any]) -> Self: ...

    def speed(self) -> float: ...


@dataclass(frozen=True)
class Applied:
    """What came of it; `remedy` None: there was nothing that could be switched on."""

    remedy: Remedy | None
    now: float
    then: float
    """Images per second before and after."""

    @property
    def is_kept(self) -> bool:
        return self.remedy is not None and self.then > WORTH_KEEPING * self.now

    @property
    def prediction_error(self) -> float:
        """Of the predicted speed, relative to the measured one."""
        assert self.remedy is not None
        return self.remedy.images_per_s / self.then - 1

    def text(self) -> str:
        if self.remedy is None:
            return "Nothing to apply: no remedy that a flag switches on promises more than 3 %."
        outcome = "kept" if self.is_kept else "reverted: it is not worth it here"
        return (
            f"Applied {self.remedy.what}: predicted {number(self.remedy.images_per_s)} img/s, "
            f"measured {number(self.then)} (before: {number(self.now)}); "
            f"the prediction was off by {self.prediction_error:+.0%}. {outcome.capitalize()}."
            + (f" Train with: {self.remedy.change}" if self.is_kept else "")
        )


def apply_best(training: Training, profile: Profile) -> Applied:
    """The best remedy that flags of the training can switch on, measured."""
    now = profile.ledger.images_per_s
    remedy = next((remedy for remedy in profile.verdict.remedies if remedy.switch), None)
    if remedy is None:
        return Applied(None, now, now)
    return Applied(remedy, now, training.with_switch(remedy.switch).speed())
