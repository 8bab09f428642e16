"""A timeline in the format of Chrome and Perfetto (https://ui.perfetto.dev opens it)."""

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.profiler.recorder import Event
from flatout.profiler.stages import label_of, place_label


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
