"""What an observation comes to: numbers, ledger, verdict, and the ways to show them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from flatout.profiler.measurement import Ledger, Limits, Measurement, make_ledger
from flatout.profiler.observe.observation import Observation
from flatout.profiler.observe.speed_of_light import SpeedOfLight
from flatout.profiler.report.save import save_report
from flatout.profiler.report.text import report_text
from flatout.profiler.verdict import Remedy, Trial, Verdict, WholeTrial, judge


class Profile:
    """Of a loop that was looked at; complete when the looking has ended."""

    def __init__(self, observation: Observation, trials: Sequence[Trial] = ()) -> None:
        self._observation = observation
        self.trials = list(trials)
        """The changed part of a remedy alone, measured: sharpens what is predicted."""
        self.wholes: list[WholeTrial] = []
        """Remedies that change network and input at once, tried out part by part."""
        self.limits = Limits()
        """To be set by whoever can make the short runs that tell them."""
        self.light: SpeedOfLight | None = None
        """What the machine can do at all; to be set by whoever has measured it."""
        self.reword: Callable[[Remedy], Remedy] = lambda remedy: remedy
        """A remedy as the training that was looked at calls it."""

    @property
    def measurement(self) -> Measurement:
        return replace(self._observation.measurement, limits=self.limits, light=self.light)

    @property
    def ledger(self) -> Ledger:
        return make_ledger(self.measurement)

    @property
    def verdict(self) -> Verdict:
        verdict = judge(self.measurement, self.trials, self.wholes)
        return replace(verdict, remedies=[self.reword(remedy) for remedy in verdict.remedies])

    def text(self) -> str:
        """Ledger and verdict, for a terminal."""
        return report_text(self.ledger, self.verdict, self.measurement)

    def save(self, folder: str | Path) -> Path:
        """Write profile.json, profile.html and trace.json; the path of the page."""
        return save_report(Path(folder), self.measurement, self.verdict, self._observation.timeline)
