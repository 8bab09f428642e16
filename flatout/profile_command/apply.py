"""Switch the best remedy on, measure again, and compare with the prediction."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.profiler import Profile, Remedy, number

if TYPE_CHECKING:
    from flatout.runs import ProfiledTraining

MIN_KEPT_GAIN = 1.02


@dataclass(frozen=True)
class Applied:
    """The result of applying a remedy; `remedy` is None if no remedy can be switched on by a flag."""

    remedy: Remedy | None
    now: float
    """Images per second before."""
    then: float
    """Images per second with the remedy."""

    @property
    def is_kept(self) -> bool:
        """Whether the measured gain is large enough to keep the remedy."""
        return self.remedy is not None and self.then > MIN_KEPT_GAIN * self.now

    @property
    def prediction_error(self) -> float:
        """Error of the predicted speed, relative to the measured one."""
        assert self.remedy is not None
        return self.remedy.images_per_s / self.then - 1

    def text(self) -> str:
        """Prediction, measurement and decision, for a terminal."""
        if self.remedy is None:
            return "Nothing to apply: no remedy that is a flag would gain more than 3 %."
        outcome = "kept" if self.is_kept else "reverted: it does not pay off here"
        return (
            f"Applied {self.remedy.what}: predicted {number(self.remedy.images_per_s)} img/s, "
            f"measured {number(self.then)} (before: {number(self.now)}); "
            f"the prediction was off by {self.prediction_error:+.0%}. {outcome.capitalize()}."
            + (f" Train with: {self.remedy.change}" if self.is_kept else "")
        )


def apply_best(training: "ProfiledTraining", profile: Profile) -> Applied:
    """Switch on the best remedy that is a flag of the training, and measure the speed; if there is none, do nothing."""
    now = profile.ledger.images_per_s
    remedy = next((remedy for remedy in profile.verdict.remedies if remedy.switch), None)
    if remedy is None:
        return Applied(None, now, now)
    return Applied(remedy, now, training.with_switch(remedy.switch).speed())
