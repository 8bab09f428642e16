"""Ledger and verdict as plain text, for logs and terminals."""

import textwrap
from collections.abc import Sequence

from flatout.profiler.ledger import Ledger, Row
from flatout.profiler.measurement import Measurement
from flatout.profiler.stages import place_label
from flatout.profiler.verdict import Verdict

WIDTH = 110
SMALL = 0.005
"""Rows below this share of the step are summed up in one."""
FEW = 3
"""Rows that are always shown."""


def report_text(ledger: Ledger, verdict: Verdict, measurement: Measurement) -> str:
    """Everything a tired person needs, on one screen."""
    parts = [*ledger_lines(ledger), "", *wait_lines(measurement), *light_lines(measurement), *verdict_lines(verdict)]
    return "\n".join(parts)


def ledger_lines(ledger: Ledger) -> list[str]:
    """One aligned table; every place adds up to the step."""
    head = (
        f"{ledger.num_steps} steps of {ledger.images:g} images: {ledger.step_ms:.1f} ms per step "
        f"(p10 {ledger.p10_ms:.1f}, p90 {ledger.p90_ms:.1f}), {ledger.images_per_s:,.1f} img/s"
    )
    lines = [head, f"{'':32}{'ms/step':>10}{'share':>8}{'us/image':>11}{'runs':>9}"]
    for place in ledger.places:
        lines.append(place_label(place))
        lines += [_line(row) for row in shown_rows(ledger.lane(place))]
    return lines


def shown_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of one place; of many, small ones are put together. The last (what no stage covers) always stays."""
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
    """Host-device waits with their code lines, launches; nothing where nothing was found."""
    waits = list(measurement.waits)
    kind = "host-device waits" if measurement.has_device else "numbers read out of tensors"
    lines = []
    if waits:
        lines.append(f"{kind}: {sum(site.per_step for site in waits):,.1f} per step")
        lines += [f"  {site.per_step:>9,.1f}  {site.where}  {site.text}"[:WIDTH] for site in waits[:5]]
    if measurement.launches is not None:
        lines.append(f"kernel launches: {measurement.launches:,.0f} per step")
    return [*lines, ""] if lines else []


def light_lines(measurement: Measurement) -> list[str]:
    """What this machine can do at all; nothing where it was not measured."""
    if measurement.light is None:
        return []
    return ["what this machine can do at all", *(f"  {line}" for line in measurement.light.lines()), ""]


def verdict_lines(verdict: Verdict, width: int = WIDTH) -> list[str]:
    """Cause, evidence, and what each remedy would be worth."""
    lines = wrapped(f"Verdict: {verdict.cause}. {verdict.sentence}", width=width)
    lines += [part for text in verdict.evidence for part in wrapped(f"  - {text}", "    ", width)]
    if verdict.remedies:
        lines.append("If you do this:")
        lines += [
            part
            for number, remedy in enumerate(verdict.remedies, start=1)
            for part in wrapped(f"  {number}. {remedy.line()}", "     ", width)
        ]
    if verdict.others:
        lines.append(f"Lesser findings: {', '.join(finding.cause for finding in verdict.others)}.")
    return lines


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    """Lines of at most `width` characters."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _line(row: Row) -> str:
    runs = f"{row.runs:9,.1f}" if row.runs else f"{'':9}"
    return f"  {row.label[:29]:<30}{row.ms:10.2f}{row.share:8.1%}{row.us_per_image:11,.1f}{runs}"
