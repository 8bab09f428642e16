"""Which frames make a clip? Paired by name, never across a gap; and in validation every frame is scored once.

Pure: names in, windows out.

Dimension key:  L frames of a clip
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple


class ScoredWindow(NamedTuple):
    """A clip of a validation."""

    first: int
    """Position in its run."""
    score_L: tuple[bool, ...]
    """Frames that no earlier window has scored."""


def ordered(stems: Collection[str]) -> list[str]:
    """By number if all names are numbers, else by text."""
    return sorted(stems, key=lambda stem: (int(stem), stem)) if _are_numbers(stems) else sorted(stems)


def usable_runs(blur: Collection[str], sharp: Collection[str], spike: Collection[str]) -> list[list[str]]:
    """Maximal runs of neighbouring frames that have all three parts; numbers in a run rise by one."""
    numbered = _are_numbers(blur)
    complete = set(sharp) & set(spike)
    runs: list[list[str]] = []
    before: str | None = None
    for stem in ordered(blur):
        if stem in complete:
            if before is None or (numbered and int(stem) != int(before) + 1):
                runs.append([])
            runs[-1].append(stem)
        before = stem if stem in complete else None
    return runs


def training_windows(run_length: int, clip_length: int) -> range:
    """Where a clip may begin in a run: anywhere."""
    return range(max(0, run_length - clip_length + 1))


def scored_windows(run_length: int, clip_length: int) -> list[ScoredWindow]:
    """Clips side by side; what is left over at the end is scored by one that is shifted back."""
    if run_length < clip_length:
        return []
    firsts = list(range(0, run_length - clip_length + 1, clip_length))
    if firsts[-1] + clip_length < run_length:
        firsts.append(run_length - clip_length)
    scored = 0
    windows = []
    for first in firsts:
        windows.append(ScoredWindow(first, tuple(first + offset >= scored for offset in range(clip_length))))
        scored = first + clip_length
    return windows


def windows_of(run: Sequence[str], firsts: Sequence[int] | range, clip_length: int) -> Iterator[list[str]]:
    """The names in each window."""
    for first in firsts:
        yield list(run[first : first + clip_length])


def _are_numbers(stems: Collection[str]) -> bool:
    return all(stem.isascii() and stem.isdigit() for stem in stems)
