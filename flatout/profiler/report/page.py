"""The profile as a self-contained HTML page: no script, no font, no network."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from flatout.clock import STAGES, Event, canonical, is_pause, kind_of, label_of, place_label
from flatout.profiler.measurement import HotLine, Ledger, Measurement, Row
from flatout.profiler.report.text import SMALL_S, how_often, idle_lines, pauses_of, runs_of, shown_rows, wait_kind
from flatout.profiler.verdict import Remedy, Verdict
from flatout.profiler.verdict.remedy import number

# One colour per kind of work, the same in bars, timeline and legend; readable on light and dark backgrounds.

KIND_COLOURS = {
    "wait": "#e5484d",
    "copy": "#f76b15",
    "input": "#f5a524",
    "compute": "#3e63dd",
    "loss": "#8e4ec6",
    "update": "#12a594",
    "after": "#0091ff",
    "pause": "#e93d82",
    "other": "#8b8d98",
    "idle": "#d9d9e0",
}
SHADES = (1.0, 0.78, 0.62, 0.5)
"""Opacities that distinguish stages of the same kind."""
_ORDER = {stage: number for number, stage in enumerate(STAGES)}


def colors_of(stages: Iterable[str]) -> dict[str, tuple[str, float]]:
    """Stage -> colour and opacity. A stage has the same ones however long the others take."""
    used: Counter[str] = Counter()
    chosen = {}
    for stage in sorted(stages, key=_stage_order):
        kind = kind_of(stage)
        chosen[stage] = KIND_COLOURS[kind], SHADES[min(used[kind], len(SHADES) - 1)]
        used[kind] += 1
    return chosen


def _stage_order(stage: str) -> tuple[int, str]:
    name = canonical(stage)
    return _ORDER.get(name, len(_ORDER)), name


# Timeline: what each place did in the last steps, as one SVG

WIDTH, ROW, LEFT, LETTER = 1010, 24, 150, 7
MAX_EVENTS = 1500


def timeline_svg(timeline: Mapping[str, Sequence[Event]], span_ns: int) -> str:
    """Timeline of the last `span_ns` of steps for which both main thread and device have events; empty without.

    If a pause falls into that span, steps before the pause are shown.
    """
    # A main thread that runs ahead has finished its last steps before the device begins them.
    ends = {place: max(event.end_ns for event in lane) for place, lane in timeline.items() if lane}
    if not ends or not span_ns:
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
    """The last time before which `span_ns` are free of pauses; `end_ns` itself if there is none."""
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
            tone = "dark" if kind_of(event.name) == "idle" else "name"  # white is unreadable on pale grey
            boxes.append(f'<text class="{tone}" x="{left + 5:.1f}" y="{top + 14:.1f}">{label}</text>')
        boxes.append("</g>")
    return boxes


def _grid(span_ns: int, height: float) -> str:
    """Grid lines with labels at round numbers of milliseconds."""
    span_ms = span_ns / 1e6
    round_ms = (digit * 10.0**power for power in range(-3, 8) for digit in (1, 2, 5))
    step_ms = next(step for step in round_ms if span_ms / step <= 10)
    lines = []
    for line in range(int(span_ms / step_ms) + 1):
        x = LEFT + (WIDTH - LEFT) * line * step_ms / span_ms
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height:.0f}"/>')
        label = f"{line * step_ms:g} ms"
        if x + 3 + LETTER * len(label) < WIDTH:  # omit labels that would be cut off
            lines.append(f'<text x="{x + 3:.1f}" y="11">{label}</text>')
    return "".join(lines)


# Page

STEPS_SHOWN = 3
"""Length of the timeline, in average steps."""
MIN_BETWEEN_SHARE = 0.05
"""Fraction of the time between steps above which the head of the page shows it."""
MAX_LOCATION_CHARS = 44
"""Longest file:line that is shown in full."""


def page(ledger: Ledger, verdict: Verdict, measurement: Measurement, timeline: Mapping[str, Sequence[Event]]) -> str:
    """The complete HTML document: verdict, remedies, limits, ledger, timeline, waits and hot lines."""
    title = measurement.title or "Profile of a training"
    parts = [
        _head(title, ledger, measurement),
        _verdict(verdict),
        _remedies(verdict),
        _limits(ledger, measurement),
        _fixed_costs(measurement),
        _light(measurement),
        _ledger(ledger),
        _timeline(timeline, ledger),
        _waits(measurement),
        _idle(measurement),
        _between(ledger, measurement),
        _lines(measurement),
        _foot(measurement),
    ]
    css = Path(__file__).with_name("page.css").read_text()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{css}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _head(title: str, ledger: Ledger, measurement: Measurement) -> str:
    figures = [
        (number(ledger.images_per_s), "images per second"),
        (f"{number(ledger.step_ms)} ms", f"per step (p10 {number(ledger.p10_ms)}, p90 {number(ledger.p90_ms)})"),
    ]
    between_ms = sum(row.ms for row in pauses_of(ledger))
    if between_ms > MIN_BETWEEN_SHARE * ledger.step_ms:
        figures.append((f"{number(ledger.step_ms - between_ms)} ms", "of that inside the step, the rest between steps"))
    figures.append((f"{ledger.images:g}", f"images per step, {ledger.num_steps} steps timed"))
    blocks = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in figures)
    return f'<h1>{escape(title)}</h1><div class="numbers">{blocks}</div>'


def _verdict(verdict: Verdict) -> str:
    evidence = "".join(f"<li>{escape(line)}</li>" for line in verdict.evidence)
    kind = "verdict" if verdict.is_worth_changing else "verdict nothing"
    return (
        f'<section class="{kind}"><h2>Verdict: {escape(verdict.cause)}</h2>'
        f"<p>{escape(verdict.sentence)}</p><ul>{evidence}</ul></section>"
    )


def _remedies(verdict: Verdict) -> str:
    most = max((remedy.images_per_s / (1 - remedy.uncertainty) for remedy in verdict.remedies), default=0.0)
    rows = "".join(_remedy(remedy, most) for remedy in verdict.remedies)
    return _section("Remedies: images per second now and predicted", rows)


def _remedy(remedy: Remedy, most: float) -> str:
    low, high = (remedy.images_per_s / (1 + sign * remedy.uncertainty) for sign in (1, -1))
    speeds = (remedy.now_images_per_s, remedy.images_per_s, low, high)
    now, then, begin, end = (100 * min(1.0, value / most) for value in speeds)
    return (
        f'<div class="remedy"><div><b>{escape(remedy.what)}</b><br><span class="gain">{remedy.gain:.2f}x</span> '
        f'<span class="soft small">{number(low)} to {number(high)} img/s expected</span></div>'
        f'<div><div class="track"><i class="now" style="width:{now:.1f}%"></i>'
        f'<em style="left:calc({now:.1f}% + 8px)">{number(remedy.now_images_per_s)} now</em></div>'
        f'<div class="track"><i class="then" style="width:{then:.1f}%"></i>'
        f'<i class="range" style="left:{begin:.1f}%;width:{end - begin:.1f}%"></i>'
        f'<em style="left:calc({end:.1f}% + 8px)">{number(remedy.images_per_s)} predicted</em></div>'
        f"<code>{escape(remedy.change)}</code></div></div>"
    )


def _limits(ledger: Ledger, measurement: Measurement) -> str:
    limits = measurement.limits
    parts = {
        "network alone, on one batch that is ready": limits.compute_ms,
        "network and copy, on batches kept in host memory": limits.transfer_ms,
        "input alone, without using the batches": limits.input_ms,
    }
    measured = {name: ms for name, ms in parts.items() if ms}
    speeds = measured | {"the training as it is": ledger.step_ms} if measured else {}
    rows = [(name, f"{number(ms)} ms", f"{number(1e3 * ledger.images / ms)} img/s") for name, ms in speeds.items()]
    return _section("Limits: the speed of each part by itself", _table(rows))


def _fixed_costs(measurement: Measurement) -> str:
    if not measurement.fixed_s:
        return ""
    costs = measurement.fixed_s.items()
    rows = [(escape(label), f"{seconds:,.2f} s") for label, seconds in costs if seconds >= SMALL_S]
    return f"<h2>Fixed costs of this run, besides its steps</h2>{_table(rows)}"


def _light(measurement: Measurement) -> str:
    limits = measurement.light.rows() if measurement.light else []
    rows = [(name, f"{value:,.1f} {unit}") for name, value, unit in limits]
    return _section("Hardware limits of this machine", _table(rows))


def _ledger(ledger: Ledger) -> str:
    lanes = "".join(_lane(place, shown_rows(ledger.lane(place))) for place in ledger.places)
    step_ms = number(ledger.step_ms)
    return _section(f"Where the time of a step goes: every place adds up to {step_ms} ms of wall time", lanes)


def _lane(place: str, rows: Sequence[Row]) -> str:
    colors = colors_of([row.stage for row in rows])
    bar = "".join(
        f'<i title="{escape(row.label)}: {row.ms:.2f} ms" style="width:{100 * max(0.0, row.share):.2f}%;'
        f'background:{_rgba(*colors[row.stage])}"{_class_of(row)}>{escape(row.label) if row.share > 0.09 else ""}</i>'
        for row in rows
    )
    dots = [f'<span class="dot" style="background:{_rgba(*colors[row.stage])}"></span>' for row in rows]
    cells = [
        (dot + escape(row.label), f"{row.ms:,.2f}", f"{row.share:.1%}", f"{row.us_per_image:,.1f}", runs_of(row))
        for dot, row in zip(dots, rows, strict=True)
    ]
    table = _table(cells, ["", "ms per step", "share", "us per image", "runs"], ' class="even"')
    return f'<div class="place">{escape(place_label(place))}</div><div class="bar">{bar}</div>{table}'


def _class_of(row: Row) -> str:
    """Idle time has dark letters: white ones are unreadable on its pale grey."""
    return ' class="idle"' if kind_of(row.stage) == "idle" else ""


def _rgba(color: str, opacity: float) -> str:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _timeline(timeline: Mapping[str, Sequence[Event]], ledger: Ledger) -> str:
    step_ms = ledger.step_ms - sum(row.ms for row in pauses_of(ledger))
    svg = timeline_svg(timeline, int(STEPS_SHOWN * step_ms * 1e6))
    # In milliseconds: if the lengths of steps differ, it shows another number of them.
    span_ms = number(STEPS_SHOWN * step_ms)
    return _section(f"Timeline of the last {span_ms} ms of steps", svg)


def _waits(measurement: Measurement) -> str:
    rows = [(site.where, site.text, f"{site.per_step:,.1f}") for site in measurement.waits[:12]]
    return _section(f"{wait_kind(measurement).capitalize()}, per step", _code_table(["times"], rows))


def _idle(measurement: Measurement) -> str:
    return "".join(_section("Why the GPU is idle", f"<p>{escape(line)}</p>") for line in idle_lines(measurement))


def _between(ledger: Ledger, measurement: Measurement) -> str:
    """Cost of what happens between steps, and where the host waits there."""
    pauses = pauses_of(ledger)
    rows = [(escape(row.label), how_often(row), f"{row.ms:,.2f}", f"{row.share:.1%}") for row in pauses]
    table = _table(rows, ["", "each time", "ms per step", "share"])
    left_ms = ledger.step_ms - sum(row.ms for row in pauses)
    title = f"Between steps (the steps themselves take {number(left_ms)} ms)"
    return _section(title, table + _waits_between(measurement))


def _waits_between(measurement: Measurement) -> str:
    rows = [
        (site.where, site.text, escape(label_of(site.stage)), f"{site.times:,}")
        for site in measurement.waits_between[:5]
    ]
    kind = wait_kind(measurement).capitalize()
    what = f"{kind}, between the steps in which they were counted. Removing them makes no step faster."
    return f'<p class="soft small">{what}</p>{_code_table(["in", "times"], rows)}' if rows else ""


def _lines(measurement: Measurement) -> str:
    lines = sorted(measurement.lines, key=lambda line: -line.ms)[:12]
    rows = [(line.where, line.text, _where_it_runs(line), f"{line.ms:,.1f}") for line in lines]
    return _section("Hottest lines, by sampling", _code_table(["in", "ms per step"], rows))


def _section(title: str, content: str) -> str:
    """A part of the page; empty if there is no content."""
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _table(rows: Sequence[tuple[str, ...]], titles: Sequence[str] = (), attributes: str = "") -> str:
    """A table of cells in HTML, with a head if there are titles; empty without rows."""
    head = f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>" if titles else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table{attributes}>{head}{body}</table>" if rows else ""


def _code_table(titles: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str:
    """A table of code lines; empty without rows. A row is file:line, cut at the front if the path is long, the source
    line, and HTML for the columns called `titles`."""
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = ""
    for where, text, *cells in rows:
        shown = where if len(where) <= MAX_LOCATION_CHARS else f"…{where[-MAX_LOCATION_CHARS:]}"
        body += (
            f'<tr><td class="mono place-of" title="{escape(where)}">{escape(shown)}</td>'
            f'<td class="left mono code">{escape(text)}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        )
    return f'<table><tr><th>line</th><th class="left">code</th>{head}</tr>{body}</table>' if rows else ""


def _where_it_runs(line: HotLine) -> str:
    if line.in_worker:
        return "worker"
    return escape(label_of(line.stage)) if line.stage else "main"


def _foot(measurement: Measurement) -> str:
    facts = " &middot; ".join(f"{escape(name)} {escape(value)}" for name, value in measurement.machine.items())
    return f'<p class="soft small">{facts}</p>'
