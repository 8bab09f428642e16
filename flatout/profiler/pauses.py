"""What happens between steps: a validation, a checkpoint, pictures for people, the end of an epoch.

It is part of the time that a training takes, and of no step: whatever is marked, waited for or traced in a pause must
not be taken for something that every step does.
"""

from collections.abc import Sequence

from flatout.profiler.clock import _Mark
from flatout.profiler.stages import AHEAD, ENGINE, canonical

PAUSES = frozenset({"between", "validate", "checkpoint", "pictures"})
"""Stages that run between two steps, never inside one."""

LOG = "log"
"""Between steps if it comes now and then; part of a step if it comes with every one."""

PAUSING = PAUSES | {name for name, stage in ENGINE.items() if stage in PAUSES}
"""The same and the engine's own names for them."""

_APART = frozenset({*PAUSES, LOG, AHEAD})


def is_pause(name: str) -> bool:
    """Whether a mark of this name is a pause; the engine's own names too."""
    return name in PAUSING


def stage_apart(mark: _Mark | None) -> str | None:
    """Innermost of the open stages that are no part of an ordinary step; None inside of one."""
    while mark is not None:
        if (stage := canonical(mark.name)) in _APART:
            return stage
        mark = mark.outer
    return None


def owners(marks: Sequence[tuple[str, int]]) -> list[str]:
    """To which stage each mark's own time is charged: inside a pause, to the pause.

    Waiting for the pictures of a validation is validation, not a step that waits for data. Marks are (name, depth) in
    the order of their ends.
    """
    charged: list[str] = []
    around: list[tuple[int, str | None]] = []  # depth and owner of what encloses the mark
    for name, depth in reversed(marks):
        while around and around[-1][0] >= depth:
            around.pop()
        pause = around[-1][1] if around else None
        owner = name if pause is None or is_pause(name) else pause
        around.append((depth, owner if is_pause(owner) else None))
        charged.append(owner)
    return charged[::-1]
