"""The last steps as a picture: what each place did when. One SVG, no script."""

from collections.abc import Mapping, Sequence
from html import escape

from flatout.profiler.pauses import is_pause
from flatout.profiler.recorder import Event
from flatout.profiler.report.colors import colors_of
from flatout.profiler.stages import kind_of, label_of, place_label

WIDTH, ROW, LEFT, LETTER = 1010, 24, 150, 7
MAX_EVENTS = 1500


def timeline_svg(timeline: Mapping[str, Sequence[Event]], span_ns: int) -> str:
    """The last `span_ns` of steps that main thread and device both have something to show of; empty without events.

    Where a pause cuts it short, steps before the pause are shown.
    """
    # A main thread that runs ahead has ended its last steps before the device has begun them.
    ends = {place: max(event.end_ns for event in lane) for place, lane in timeline.items() if lane}
    if not ends:
        return ""
    end_ns = min((ends[place] for place in ("host", "device") if place in ends), default=max(ends.values()))
    end_ns = _before_pauses(timeline.get("host", ()), end_ns, span_ns)
    begin_ns = end_ns - span_ns
    rows, y = [], 20.0
    for place, events in timeline.items():
        shown = [event for event in events if event.end_ns > begin_ns and event.begin_ns < end_ns][-MAX_EVENTS:]
        if not shown:
            continue
        first = min(event.depth for event in shown)
        depth = max(event.depth for event in shown) - first + 1
        rows.append(f'<text x="0" y="{y + 16:.0f}">{escape(place_label(place))}</text>')
        rows += _boxes(shown, begin_ns, span_ns, y, first)
        y += depth * ROW + 10
    grid = _grid(span_ns, y)
    return (
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {y + 4:.0f}" role="img" '
        f'aria-label="Timeline of the last steps">{grid}{"".join(rows)}</svg></div>'
    )


def _before_pauses(host: Sequence[Event], end_ns: int, span_ns: int) -> int:
    """The last moment that `span_ns` without a pause lie before; `end_ns` itself if there is no such moment."""
    latest = end_ns
    for pause in sorted((event for event in host if is_pause(event.name)), key=lambda event: -event.end_ns):
        if pause.end_ns > latest - span_ns and pause.begin_ns < latest:
            latest = pause.begin_ns
    first = min((event.begin_ns for event in host), default=end_ns)
    return latest if latest - span_ns >= first else end_ns


def _boxes(events: Sequence[Event], begin_ns: int, span_ns: int, y: float, first_depth: int) -> list[str]:
    colors = colors_of(sorted({event.name for event in events}))
    scale = (WIDTH - LEFT) / span_ns
    boxes = []
    for event in events:
        left = LEFT + max(0, event.begin_ns - begin_ns) * scale
        end_ns = min(event.end_ns, begin_ns + span_ns)
        width = max(0.6, (end_ns - max(event.begin_ns, begin_ns)) * scale)
        top = y + (event.depth - first_depth) * ROW
        color, opacity = colors[event.name]
        label, ms = escape(label_of(event.name)), (event.end_ns - event.begin_ns) / 1e6
        boxes.append(
            f'<g><title>{label}: {ms:.2f} ms</title><rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{ROW - 4}" rx="2" fill="{color}" fill-opacity="{opacity}"/>'
        )
        if width > 8 * len(label):
            tone = "dark" if kind_of(event.name) == "idle" else "name"  # white letters are lost on pale grey
            boxes.append(f'<text class="{tone}" x="{left + 5:.1f}" y="{top + 14:.1f}">{label}</text>')
        boxes.append("</g>")
    return boxes


def _grid(span_ns: int, height: float) -> str:
    """A line and a number every 'round' number of milliseconds."""
    span_ms = span_ns / 1e6
    step_ms = next(step for step in _round_steps() if span_ms / step <= 10)
    lines = []
    for number in range(int(span_ms / step_ms) + 1):
        x = LEFT + (WIDTH - LEFT) * number * step_ms / span_ms
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height:.0f}"/>')
        label = f"{number * step_ms:g} ms"
        if x + 3 + LETTER * len(label) < WIDTH:  # a number that does not fit any more says nothing
            lines.append(f'<text x="{x + 3:.1f}" y="11">{label}</text>')
    return "".join(lines)


def _round_steps() -> list[float]:
    return [digit * 10.0**power for power in range(-3, 8) for digit in (1, 2, 5)]
