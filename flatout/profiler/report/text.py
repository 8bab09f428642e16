"""Ledger and verdict as plain text, for logs and terminals."""

import textwrap
from collections.abc import Sequence

from flatout.clock import PAUSES, label_of, place_label
from flatout.profiler.measurement import Ledger, Measurement, Row
from flatout.profiler.verdict import Verdict
from flatout.profiler.verdict.predict_step import StepNumbers
from flatout.profiler.verdict.remedy import number

WIDTH = 110
LABEL = 40
"""Characters of a stage's name."""
SMALL = 0.005
"""Rows below this fraction of the step are combined into one."""
SMALL_S = 0.005
"""Fixed costs below this are not shown."""
FEW = 3
"""Up to this many stages are always shown one by one."""


def report_text(ledger: Ledger, verdict: Verdict, measurement: Measurement) -> str:
    """The whole report as text: ledger, notes, verdict."""
    return "\n".join([*ledger_lines(ledger), "", *note_lines(ledger, measurement), *verdict_lines(verdict)])


def note_lines(ledger: Ledger, measurement: Measurement) -> list[str]:
    """What a report says between ledger and verdict: waits, time between steps, fixed costs, hardware limits."""
    notes = [*wait_lines(measurement), *between_lines(ledger, measurement)]
    return [*notes, *fixed_cost_lines(measurement), *speed_of_light_lines(measurement)]


def ledger_head(ledger: Ledger) -> str:
    """Steps, their time and the speed, in one line."""
    return (
        f"{ledger.num_steps} steps of {ledger.images:g} images: {ledger.step_ms:.1f} ms per step "
        f"(p10 {ledger.p10_ms:.1f}, p90 {ledger.p90_ms:.1f}), {ledger.images_per_s:,.1f} img/s"
    )


def ledger_lines(ledger: Ledger) -> list[str]:
    """The ledger as an aligned table; the rows of every place add up to the step."""
    lines = [ledger_head(ledger), f"{'':{LABEL + 3}}{'ms/step':>10}{'share':>8}{'us/image':>13}{'runs':>9}"]
    for place in ledger.places:
        lines.append(place_label(place))
        lines += [_line(row) for row in shown_rows(ledger.lane(place))]
    return lines


def shown_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of one place; if there are many, small ones are combined. The last (uncovered time) always stays."""
    *stages, rest = rows
    if len(stages) <= FEW:
        return list(rows)
    shown = [row for row in stages if row.share >= SMALL]
    small = [row for row in stages if row.share < SMALL]
    if len(small) > 1:
        total = [sum(getattr(row, name) for row in small) for name in ("ms", "share", "us_per_image", "runs")]
        small = [Row(rest.place, f"{len(small)} smaller stages", *total)]
    return [*shown, *small, rest]


def wait_lines(measurement: Measurement) -> list[str]:
    """Host-device waits with their code lines, and kernel launches; empty if there are none."""
    waits = list(measurement.waits)
    lines = []
    if waits:
        lines.append(f"{wait_kind(measurement)}, per step: {sum(site.per_step for site in waits):,.1f}")
        lines += [f"  {site.per_step:>9,.1f}  {site.where}  {site.text}"[:WIDTH] for site in waits[:5]]
    if measurement.launches is not None:
        lines.append(f"kernel launches, per step: {measurement.launches:,.0f}")
    lines += idle_lines(measurement)
    return [*lines, ""] if lines else []


def idle_lines(measurement: Measurement) -> list[str]:
    """Why the GPU is idle; empty without a GPU or a trace."""
    idle_ms = StepNumbers(measurement).device_idle_ms
    split = measurement.idle_split
    if split is None or idle_ms <= 0:
        return []
    parts = {
        "the host queued nothing": split.host_ms,
        "gaps between kernels": split.gap_ms,
        "copies from or to the host": split.transfer_ms,
    }
    traced_ms = sum(parts.values())
    if traced_ms <= 0:
        return []
    # Shares of the traced steps: tracing makes the steps themselves longer.
    shares = ", ".join(f"{name} {number(idle_ms * ms / traced_ms)}" for name, ms in parts.items())
    return [f"GPU idle, {number(idle_ms)} ms per step: {shares} ms"]


def wait_kind(measurement: Measurement) -> str:
    """What counts as a wait: without a device nothing waits, but reads of single values show the same code lines."""
    return "host-device waits" if measurement.has_device else "values read out of tensors one at a time"


def between_lines(ledger: Ledger, measurement: Measurement) -> list[str]:
    """Cost of what happens between steps, and where the host waits there; empty if nothing happens."""
    lines = []
    if pauses := pauses_of(ledger):
        ms = sum(row.ms for row in pauses)
        lines.append(
            f"between steps: {ms:.1f} of {ledger.step_ms:.1f} ms per step ({ms / ledger.step_ms:.0%}); "
            f"the steps themselves take {ledger.step_ms - ms:.1f} ms"
        )
        lines += [f"  {row.label}: {how_often(row)}" for row in pauses if row.share >= SMALL]
    if waits := list(measurement.waits_between):
        total = sum(site.times for site in waits)
        lines.append(f"{wait_kind(measurement)}, between the steps in which they were counted: {total:,}")
        lines += [
            f"  {site.times:>9,}  {label_of(site.stage)}: {site.where}  {site.text}"[:WIDTH].rstrip()
            for site in waits[:3]
        ]
    return [*lines, ""] if lines else []


def pauses_of(ledger: Ledger) -> list[Row]:
    """Rows of the main thread that belong to no step."""
    return [row for row in ledger.lane("host") if row.stage in PAUSES]


def how_often(row: Row) -> str:
    """Cost and frequency of a row: '40.0 ms every 8 steps'."""
    if not 0 < row.runs < 0.9:
        return f"{row.ms:.1f} ms per step"
    return f"{number(row.ms / row.runs)} ms every {1 / row.runs:,.0f} steps"


def fixed_cost_lines(measurement: Measurement) -> list[str]:
    """What the run cost besides its steps; empty if it was not recorded."""
    costs = measurement.fixed_s
    if not costs:
        return []
    rows = [f"  {label:<{LABEL + 1}}{seconds:10.2f} s" for label, seconds in costs.items() if seconds >= SMALL_S]
    head = f"fixed costs of this run, besides its steps: {sum(costs.values()):.1f} s"
    return [head, *rows, "  validations, plots and saves of a whole run: flatout profile --run FOLDER", ""]


def speed_of_light_lines(measurement: Measurement) -> list[str]:
    """Hardware limits of this machine; empty if they were not measured."""
    if measurement.light is None:
        return []
    return ["hardware limits of this machine", *(f"  {line}" for line in measurement.light.lines()), ""]


def verdict_lines(verdict: Verdict, width: int = WIDTH) -> list[str]:
    """Cause, evidence, and remedies with their predicted speeds."""
    lines = wrapped(f"Verdict: {verdict.cause}. {verdict.sentence}", width=width)
    lines += [part for text in verdict.evidence for part in wrapped(f"  - {text}", "    ", width)]
    if verdict.remedies:
        lines.append("Remedies:")
        lines += [
            part
            for number, remedy in enumerate(verdict.remedies, start=1)
            for part in wrapped(f"  {number}. {remedy.line()}", "     ", width)
        ]
    if verdict.others:
        lines.append(f"Also found: {', '.join(bottleneck.cause for bottleneck in verdict.others)}.")
    return lines


def runs_of(row: Row) -> str:
    """Runs per step: '2.0', '0.13'; empty if not counted."""
    if not row.runs:
        return ""
    return f"{row.runs:,.1f}" if row.runs >= 0.95 else f"{row.runs:.2g}"


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    """Lines of at most `width` characters."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _line(row: Row) -> str:
    numbers = f"{row.ms:10,.2f}{row.share:8.1%}{row.us_per_image:13,.1f}{runs_of(row):>9}"
    return f"  {row.label[:LABEL]:<{LABEL + 1}}{numbers}".rstrip()
