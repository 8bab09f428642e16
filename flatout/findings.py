"""What a check or the doctor found about one thing: what it is, how serious, where, and what to do about it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.errors import ResourceError, counted

Level = Literal["ok", "note", "warn", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warn", "bad")
"""From harmless to "training will not run as it should"."""

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""For a data set. error: data is lost or training cannot start; warning: likely a mistake; note: good to know."""
LEVEL_OF: dict[Severity, Level] = {"error": "bad", "warning": "warn", "note": "note"}


@dataclass(frozen=True)
class Finding:
    """One line of a report. For `ok` the advice says why the thing matters, else what to do."""

    topic: str
    """What was looked at, or the name of the check that found it."""
    value: str
    """What was found."""
    level: Level
    advice: str = ""
    where: str = ""
    """File, or file:line, or the part of a data set."""


def exit_code(findings: Iterable[Finding]) -> int:
    """0, or the code for lacking resources as soon as one finding is bad."""
    return ResourceError.exit_code if is_bad(findings) else 0


def is_bad(findings: Iterable[Finding]) -> bool:
    """Whether a training would not run as it should."""
    return any(finding.level == "bad" for finding in findings)


def places(findings: Sequence[Finding], most: int, hint: str = "") -> list[str]:
    """Lines with the first places of findings of one kind; `hint` says how to see the others."""
    lines = [f"           {_printable(each.where)}: {_printable(each.value)}" for each in findings[:most]]
    return lines + ([f"           ... and {len(findings) - most} more{hint}"] if len(findings) > most else [])


def summary(findings: Iterable[Finding], num_checks: int) -> str:
    """The last line of a check: '9 checks: 2 errors, 1 note'."""
    totals = Counter(finding.level for finding in findings)
    told = [counted(totals[level], severity) for severity, level in LEVEL_OF.items() if totals[level]]
    return f"{num_checks} checks: {', '.join(told) or 'nothing found'}"


def in_units(num_bytes: int) -> str:
    """Bytes for people: 64 MiB, 23.5 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _printable(text: str) -> str:
    # A file may have any name; none of it may steer a terminal.
    return text if text.isprintable() else repr(text)
