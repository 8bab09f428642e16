"""The result of an observation: measurement, ledger and verdict, and the files they are saved in.

Files of a profile: profile.json (the numbers), profile.html (a page), trace.json (a timeline for Perfetto).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from flatout.clock import Event, label_of, place_label
from flatout.errors import ConfigError
from flatout.profiler.measurement import (
    HotLine,
    IdleSplit,
    Lane,
    Ledger,
    Limits,
    Measurement,
    NetworkRun,
    WaitBetween,
    WaitSite,
    make_ledger,
)
from flatout.profiler.observe.observation import Observation
from flatout.profiler.observe.speed_of_light import SpeedOfLight
from flatout.profiler.report.page import page
from flatout.profiler.report.text import report_text
from flatout.profiler.verdict import EndToEndTrial, Remedy, Trial, Verdict, diagnose

Timeline = Mapping[str, Sequence[Event]]
"""Place -> its last events."""

FORMAT = 1
LISTS = {"lanes": Lane, "waits": WaitSite, "waits_between": WaitBetween, "lines": HotLine, "network_runs": NetworkRun}
PARTS = {"idle_split": IdleSplit, "limits": Limits, "light": SpeedOfLight}
"""What the lists and the objects in the measurement of a profile.json hold."""


class Profile:
    """Profile of an observed training loop; complete when the observation has ended."""

    def __init__(self, observation: Observation, trials: Sequence[Trial] = ()) -> None:
        self._observation = observation
        self.trials = list(trials)
        """Measurements of the part that a remedy changes, by itself; they make its prediction more accurate."""
        self.end_to_end_trials: list[EndToEndTrial] = []
        """Measurements of remedies that change network and input at once."""
        self.limits = Limits()
        """Set from outside, by callers that can make the short runs that measure them."""
        self.light: SpeedOfLight | None = None
        """Hardware limits of the machine; set from outside, by callers that have measured them."""
        self.fixed_s: Mapping[str, float] = {}
        """What the run cost besides its steps; set from outside, by callers whose run has recorded it."""
        self.network_runs: Sequence[NetworkRun] = ()
        """The network by itself, in other settings; set by a watch when its loop has ended."""
        self.reword: Callable[[Remedy], Remedy] = lambda remedy: remedy
        """Rewrites a remedy in terms of the observed training, such as its own flags."""

    @property
    def measurement(self) -> Measurement:
        """The measured numbers. ConfigError if too few steps were timed."""
        return replace(
            self._observation.measurement,
            limits=self.limits,
            light=self.light,
            fixed_s=self.fixed_s,
            network_runs=self.network_runs,
        )

    @property
    def is_complete(self) -> bool:
        """Whether enough steps were timed for a measurement."""
        return self._observation.is_complete

    @property
    def ledger(self) -> Ledger:
        return make_ledger(self.measurement)

    @property
    def verdict(self) -> Verdict:
        verdict = diagnose(self.measurement, self.trials, self.end_to_end_trials)
        return replace(verdict, remedies=[self.reword(remedy) for remedy in verdict.remedies])

    def text(self) -> str:
        """Ledger and verdict, for a terminal."""
        return report_text(self.ledger, self.verdict, self.measurement)

    def save(self, folder: str | Path) -> Path:
        """Write profile.json, profile.html and trace.json; returns the path of the page."""
        return save_report(Path(folder), self.measurement, self.verdict, self._observation.timeline)


# Files


def save_report(folder: Path, measurement: Measurement, verdict: Verdict, timeline: Timeline | None = None) -> Path:
    """Write profile.json, profile.html and trace.json; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    timeline = timeline or {}
    content = {"format": FORMAT, "measurement": asdict(measurement), "verdict": verdict_dict(verdict)}
    (folder / "profile.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "trace.json").write_text(json.dumps(chrome_trace(timeline)))
    path = folder / "profile.html"
    path.write_text(page(make_ledger(measurement), verdict, measurement, timeline), encoding="utf-8")
    return path


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """The verdict in plain containers; each remedy includes its predicted speed and gain."""
    remedies = [
        asdict(remedy) | {"images_per_s": remedy.images_per_s, "gain": remedy.gain} for remedy in verdict.remedies
    ]
    return {
        "cause": verdict.cause,
        "sentence": verdict.sentence,
        "evidence": list(verdict.evidence),
        "remedies": remedies,
        "lesser": [bottleneck.cause for bottleneck in verdict.others],
    }


def load_measurement(path: str | Path) -> Measurement:
    """The measurement in a profile.json, for `diagnose` and `make_ledger`. ConfigError if it cannot be read."""
    try:
        content = json.loads(Path(path).read_text())["measurement"]
        # Of another version some may be unknown, and some not there yet; those that are None have a default.
        known = [field.name for field in fields(Measurement) if content.get(field.name) is not None]
        parts: dict[str, Any] = {name: content[name] for name in known}
        parts |= {name: [kind(**each) for each in parts[name]] for name, kind in LISTS.items() if name in known}
        parts |= {name: kind(**parts[name]) for name, kind in PARTS.items() if name in known}
        return Measurement(**parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"{path} is not a profile that this version can read: {reason}. Give a profile.json of `flatout profile` "
            "or watch(), or measure again."
        ) from error


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """A timeline in the format of Chrome and Perfetto (https://ui.perfetto.dev opens it).

    One row per place; times in microseconds since the first event.
    """
    events = [event for lane in timeline.values() for event in lane]
    start_ns = min((event.begin_ns for event in events), default=0)
    entries: list[dict[str, Any]] = []
    for row, (place, lane) in enumerate(timeline.items()):
        entries.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": place_label(place)}})
        entries += [
            {
                "ph": "X",
                "pid": 1,
                "tid": row,
                "name": label_of(event.name),
                "ts": (event.begin_ns - start_ns) / 1e3,
                "dur": (event.end_ns - event.begin_ns) / 1e3,
            }
            for event in lane
        ]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}
