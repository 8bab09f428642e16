"""Lines that are brighter or darker in target than in the references: what a network must learn not to report.

Dimension key:  C planes   H W patch   L lines
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flatout.defect.strips.canonical import TOP

LEAST, MOST = 30.0, 50.0
"""Amplitudes of lines, in grey levels."""
REF_SCALE = 0.6
"""What the references get of it."""


class Room(NamedTuple):
    """How far a line may go up and down before it saturates anywhere."""

    up: float
    down: float

    @property
    def allows_bright(self) -> bool:
        return self.up >= LEAST

    @property
    def allows_dark(self) -> bool:
        return self.down <= -LEAST


class Line(NamedTuple):
    """A line across the whole patch."""

    horizontal: bool
    place: int
    width: int
    amplitude: float

    def area(self) -> tuple[slice, slice, slice]:
        along, across = slice(None), slice(self.place, self.place + self.width)
        return (along, across, along) if self.horizontal else (along, along, across)


def room_of(area: np.ndarray) -> Room:
    """From the pixels of all three planes under a line."""
    return Room(min(TOP - float(area.max()), MOST), max(-float(area.min()), -MOST))


def add_line(patch_CHW: np.ndarray, line: Line, ref_scale: float = REF_SCALE) -> None:
    """Target gets the amplitude, the references a share of it; not clipped."""
    patch_CHW[line.area()] += np.array([line.amplitude, *[line.amplitude * ref_scale] * 2], np.float32)[:, None, None]


def paint_lines(patch_CHW: np.ndarray, sample: Mapping[str, np.ndarray]) -> None:
    """The lines of a sample (see `draw`), in place; one that has no room is left out."""
    lines = [choose_line(patch_CHW, numbers_5) for numbers_5 in sample["lines"][: int(sample["num_lines"])]]
    for line in lines:
        if line is not None:
            add_line(patch_CHW, line)
    np.clip(patch_CHW, 0, TOP, out=patch_CHW)


def choose_line(patch_CHW: np.ndarray, numbers_5: np.ndarray) -> Line | None:
    """A line from uniform numbers and the room that the pixels under it leave; None if there is none."""
    horizontal, width = bool(numbers_5[0] < 0.5), int(numbers_5[1])
    side = patch_CHW.shape[1 if horizontal else 2]
    line = Line(horizontal, int(numbers_5[2] * (side - width + 1)), width, 0.0)
    room = room_of(patch_CHW[line.area()])
    dark = room.allows_dark and (not room.allows_bright or numbers_5[3] < 0.5)
    if not dark and not room.allows_bright:
        return None
    strength = float(numbers_5[4])
    amplitude = room.down + strength * (-LEAST - room.down) if dark else LEAST + strength * (room.up - LEAST)
    return line._replace(amplitude=amplitude)
