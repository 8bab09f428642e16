"""After a run, say how many golden cases of each group were checked."""

from collections import Counter
from typing import Any

OUTCOMES = ("passed", "failed", "skipped")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per golden group, e.g. `spike  70 passed`; nothing when no golden test was collected."""
    groups: dict[str, Counter[str]] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            if "golden" in report.keywords:
                group = report.nodeid.partition("[")[2].partition("/")[0]
                groups.setdefault(group, Counter())[outcome] += 1
    if groups:
        terminalreporter.section("golden cases")
    for group, counts in sorted(groups.items()):
        told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        terminalreporter.write_line(f"{group:<16} {told}")
