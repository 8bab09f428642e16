"""Every check there is: what it looks for, how serious it is, and what to do about it.

A check is found either while files are scanned (the scan names it in a Problem) or by a function over the finished
scan, which `looking_for` puts here. docs/data.md publishes this table.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from flatout.yolo.data.check.facts import SetFacts

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""error: data is lost or training cannot start; warning: likely a mistake; note: good to know."""


class Finding(NamedTuple):
    """One place where a check found what it looks for."""

    check: str
    where: str
    """File, or file:line, or the part of the data set."""
    text: str


Look = Callable[["SetFacts"], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One entry of the published list."""

    id: str
    severity: Severity
    looks_for: str
    advice: str
    look: Look | None = None
    """None: the scan finds it on its way."""
    stops: bool = False
    """Whether a training on such data does not start; see `open_set.py`."""


CHECKS: dict[str, Check] = {}


def looking_for(
    id: str, severity: Severity, looks_for: str, advice: str, *, stops: bool = False
) -> Callable[[Look], Look]:
    """Register a function as a check."""

    def register(look: Look) -> Look:
        add(Check(id, severity, looks_for, advice, look, stops))
        return look

    return register


def add(check: Check) -> None:
    assert check.id not in CHECKS, f"two checks are called {check.id}"
    CHECKS[check.id] = check


def exit_is_bad(findings: Iterable[Finding]) -> bool:
    """Whether any of them is an error."""
    return any(CHECKS[finding.check].severity == "error" for finding in findings)
