"""What an observation comes to: numbers, ledger, verdict, and the ways to show them.

Write a profile down: profile.json (numbers), profile.html (a page), trace.json (a timeline for Perfetto).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from flatout.clock import Event, label_of, place_label
from flatout.errors import ConfigError
from flatout.profiler.measurement import HotLine, Lane, Ledger, Limits, Measurement, WaitBetween, WaitSite, make_ledger
from flatout.profiler.observe.observation import Observation
from flatout.profiler.observe.speed_of_light import SpeedOfLight
from flatout.profiler.report.page import page
from flatout.profiler.report.text import report_text
from flatout.profiler.verdict import EndToEndTrial, Remedy, Trial, Verdict, diagnose

# A timeline in the format of Chrome and Perfetto (https://ui.perfetto.dev opens it).


def chrome_trace(timeline: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """One row per place; times in microseconds since the first event."""
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


Timeline = Mapping[str, Sequence[Event]]
FORMAT = 1


def save_report(folder: Path, measurement: Measurement, verdict: Verdict, timeline: Timeline | None = None) -> Path:
    """Write all three; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    timeline = timeline or {}
    content = {"format": FORMAT, "measurement": asdict(measurement), "verdict": verdict_dict(verdict)}
    (folder / "profile.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "trace.json").write_text(json.dumps(chrome_trace(timeline)))
    path = folder / "profile.html"
    path.write_text(page(make_ledger(measurement), verdict, measurement, timeline), encoding="utf-8")
    return path


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """Plain containers; predicted speeds are spelled out for readers that do not compute."""
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
    """The numbers of a profile.json, to be judged again."""
    try:
        content = json.loads(Path(path).read_text())["measurement"]
        parts: dict[str, Any] = {name: content[name] for name in content}
        parts["lanes"] = [Lane(**lane) for lane in content["lanes"]]
        parts["waits"] = [WaitSite(**site) for site in content["waits"]]
        parts["waits_between"] = [WaitBetween(**site) for site in content.get("waits_between", ())]
        parts["lines"] = [HotLine(**line) for line in content["lines"]]
        parts["limits"] = Limits(**content["limits"])
        parts["light"] = SpeedOfLight(**content["light"]) if content.get("light") else None
        known = {field.name for field in fields(Measurement)}
        return Measurement(**{name: value for name, value in parts.items() if name in known})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a profile that this version can read: {error}.") from error


class Profile:
    """Of a loop that was looked at; complete when the looking has ended."""

    def __init__(self, observation: Observation, trials: Sequence[Trial] = ()) -> None:
        self._observation = observation
        self.trials = list(trials)
        """The changed part of a remedy alone, measured: sharpens what is predicted."""
        self.end_to_end_trials: list[EndToEndTrial] = []
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
        verdict = diagnose(self.measurement, self.trials, self.end_to_end_trials)
        return replace(verdict, remedies=[self.reword(remedy) for remedy in verdict.remedies])

    def text(self) -> str:
        """Ledger and verdict, for a terminal."""
        return report_text(self.ledger, self.verdict, self.measurement)

    def save(self, folder: str | Path) -> Path:
        """Write profile.json, profile.html and trace.json; the path of the page."""
        return save_report(Path(folder), self.measurement, self.verdict, self._observation.timeline)
