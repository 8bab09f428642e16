"""Boxes with their names on a picture.

Dimension key:  n boxes
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from flatout.yolo.pictures.lettering import measure, shortened, write
from flatout.yolo.pictures.palette import colour_of, ink_on

MOST_LETTERS = 28
LINE_PX = 2


class Tag(NamedTuple):
    """A name on its colour, in pixels."""

    left: int
    top: int
    right: int
    bottom: int

    def overlaps(self, other: "Tag") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def draw_boxes(
    image_HWC: np.ndarray,
    box_xyxy_n4: np.ndarray,
    class_n: np.ndarray,
    names: Sequence[str],
    *,
    score_n: np.ndarray | None = None,
    letters_px: float = 7,
    line_px: int = LINE_PX,
) -> None:
    """Draw boxes in place, large ones first, then their names.

    Names never cover each other: in a crowd the surest (the largest, without scores) are named, and the colours tell
    the others' classes.
    """
    area_n = (box_xyxy_n4[:, 2:] - box_xyxy_n4[:, :2]).prod(1)
    corners = box_xyxy_n4.round().astype(int).tolist()
    for number in np.argsort(-area_n, kind="stable").tolist():
        left, top, right, bottom = corners[number]
        colour = colour_of(int(class_n[number]))
        cv2.rectangle(image_HWC, (left, top), (right, bottom), colour, line_px, cv2.LINE_AA)
    taken: list[Tag] = []
    for number in np.argsort(-(area_n if score_n is None else score_n), kind="stable").tolist():
        kind = int(class_n[number])
        name = shortened(name_of(kind, names), MOST_LETTERS)
        text = name if score_n is None else f"{name} {score_n[number]:.2f}"
        tags = _places(text, corners[number], image_HWC.shape[:2], letters_px)
        tag = next((tag for tag in tags if not any(map(tag.overlaps, taken))), None)
        if tag is not None:
            taken.append(tag)
            _draw_tag(image_HWC, tag, text, kind, letters_px)


def name_of(kind: int, names: Sequence[str]) -> str:
    """Of a class, or its number if it has none."""
    return names[kind] if kind < len(names) else f"class {kind}"


def _places(text: str, corners: Sequence[int], size_hw: tuple[int, ...], letters_px: float) -> Iterator[Tag]:
    """Above a box, inside at its top, below it; moved into the picture."""
    left, top, right, bottom = corners
    height, width = size_hw
    margin = _margin(letters_px)
    tag_w = measure(text, letters_px, _weight(letters_px))[0] + 2 * margin
    tag_h = round(letters_px) + 2 * margin
    for x, y in ((left - 1, top - tag_h), (left - 1, top - 1), (right + 2 - tag_w, top - tag_h), (left - 1, bottom)):
        x, y = max(0, min(x, width - tag_w)), max(0, min(y, height - tag_h))
        yield Tag(x, y, x + tag_w, y + tag_h)


def _draw_tag(image_HWC: np.ndarray, tag: Tag, text: str, kind: int, letters_px: float) -> None:
    colour, margin = colour_of(kind), _margin(letters_px)
    cv2.rectangle(image_HWC, (tag.left, tag.top), (tag.right - 1, tag.bottom - 1), colour, cv2.FILLED)
    left, baseline = tag.left + margin, tag.bottom - 1 - margin
    write(image_HWC, text, left, baseline, letters_px, ink_on(colour), _weight(letters_px))


def _margin(letters_px: float) -> int:
    return max(2, round(letters_px * 0.4))


def _weight(letters_px: float) -> int:
    """Width of the strokes of letters."""
    return max(1, round(letters_px / 7.5))
