"""What the doctor says about one thing: its value, how serious it is, and one line of advice."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flatout.errors import ResourceError

Level = Literal["ok", "note", "warn", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warn", "bad")
"""From harmless to "training will not run as it should"."""


@dataclass(frozen=True)
class Finding:
    """One line of the report. For `ok` the advice says why the thing matters, else what to do."""

    topic: str
    value: str
    level: Level
    advice: str


def exit_code(findings: Iterable[Finding]) -> int:
    """0, or the code for lacking resources as soon as one finding is bad."""
    return ResourceError.exit_code if any(finding.level == "bad" for finding in findings) else 0


def in_units(num_bytes: int) -> str:
    """Bytes for people: 64 MiB, 23.5 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
