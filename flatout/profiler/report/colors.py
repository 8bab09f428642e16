"""One colour per kind of work, the same in bars, timeline and legend; readable on light and dark grounds."""

from collections.abc import Iterable

from flatout.profiler.stages import STAGES, canonical, kind_of

KINDS = {
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
"""Stages of one kind in one bar are told apart by their strength."""
_ORDER = {stage: number for number, stage in enumerate(STAGES)}


def colors_of(stages: Iterable[str]) -> dict[str, tuple[str, float]]:
    """Stage -> colour and opacity; the same for forward, say, whichever of the other stages take more time than it."""
    used: dict[str, int] = {}
    chosen = {}
    for stage in sorted(stages, key=_place):
        kind = kind_of(stage)
        turn = used.get(kind, 0)
        used[kind] = turn + 1
        chosen[stage] = KINDS[kind], SHADES[min(turn, len(SHADES) - 1)]
    return chosen


def _place(stage: str) -> tuple[int, str]:
    name = canonical(stage)
    return _ORDER.get(name, len(_ORDER)), name
