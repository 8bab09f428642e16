"""Findings of checks and of the doctor: what was found, how serious it is, where, and what to do about it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.errors import ResourceError, counted

Level = Literal["ok", "note", "warn", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warn", "bad")
"""In ascending order; `bad` means that training will not run as it should."""

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Levels for data sets. error: data is lost or training cannot start; warning: likely a mistake; note: for
information."""
LEVEL_OF: dict[Severity, Level] = {"error": "bad", "warning": "warn", "note": "note"}


@dataclass(frozen=True)
class Finding:
    """One line of a report. The advice says what to do; for `ok`, why the topic matters."""

    topic: str
    """What was examined, or the name of the check."""
    value: str
    """What was found."""
    level: Level
    advice: str = ""
    where: str = ""
    """File, file:line, or part of a data set."""


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code of a report: 0, or that of ResourceError if any finding is bad."""
    return ResourceError.exit_code if is_bad(findings) else 0


def is_bad(findings: Iterable[Finding]) -> bool:
    """Whether any finding is bad."""
    return any(finding.level == "bad" for finding in findings)


def places(findings: Sequence[Finding], most: int, hint: str = "") -> list[str]:
    """Lines with the locations of the first `most` findings of one kind; `hint` says how to see the others."""
    lines = [f"           {_printable(each.where)}: {_printable(each.value)}" for each in findings[:most]]
    return lines + ([f"           ... and {len(findings) - most} more{hint}"] if len(findings) > most else [])


def summary(findings: Iterable[Finding], num_checks: int) -> str:
    """The last line of a check: '9 checks: 2 errors, 1 note'."""
    totals = Counter(finding.level for finding in findings)
    counts = [counted(totals[level], severity) for severity, level in LEVEL_OF.items() if totals[level]]
    return f"{num_checks} checks: {', '.join(counts) or 'nothing found'}"


def in_units(num_bytes: int) -> str:
    """A size in bytes as text: 64 MiB, 23.5 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _printable(text: str) -> str:
    # File names may contain control characters of a terminal.
    return text if text.isprintable() else repr(text)
