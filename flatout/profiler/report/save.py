"""Write a profile down: profile.json (numbers), profile.html (a page), trace.json (a timeline for Perfetto)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flatout.clock import Event, label_of, place_label
from flatout.errors import ConfigError
from flatout.profiler.measurement import HotLine, Lane, Limits, Measurement, WaitBetween, WaitSite, make_ledger
from flatout.profiler.observe.speed_of_light import SpeedOfLight
from flatout.profiler.report.page import page
from flatout.profiler.verdict import Verdict

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
        "lesser": [finding.cause for finding in verdict.others],
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
