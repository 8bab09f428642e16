"""Where objects are pasted into a finished picture: twenty attempts, from large to small. Pixels are others' affair."""

from collections.abc import Callable

import numpy as np

MOST_COVERED = 0.30
"""Of any label's area, by what is pasted over it."""
ENOUGH = 30
"""Objects are collected until there are so many."""
SIZES = (0.75,) * 2 + (0.5,) * 4 + (0.25,) * 4 + (0.125,) * 4 + (0.0625,) * 6
"""Greatest side of a pasted object as a share of the picture's, attempt by attempt."""
SKIPPED = 0.2
LEAST_SPACE, LEAST_SIDE, LEAST_VALUES = 20, 10, 60

Space = tuple[int, int, int, int]
"""x1, y1, x2, y2 in pixels."""
Paste = Callable[[int, Space], tuple[int, int] | None]
"""(number of the object, space) -> width and height that it takes of the space, or None if it is not pasted."""


def covered_share(box_4: np.ndarray, label_box_T4: np.ndarray) -> np.ndarray:
    """Share of each label's area that lies in the box, [T]."""
    low, high = np.maximum(box_4[:2], label_box_T4[:, :2]), np.minimum(box_4[2:], label_box_T4[:, 2:])
    area = (label_box_T4[:, 2:] - label_box_T4[:, :2]).prod(1) + 1e-16
    return np.asarray((high - low).clip(0).prod(1) / area)


def paste_all(
    wh: tuple[int, int], label_T5: np.ndarray, class_K: list[float], tries_A6: np.ndarray, paste: Paste
) -> np.ndarray:
    """Try to paste objects of these classes; returns labels (class, corners in pixels) float32 [T + pasted, 5].

    tries_A6 holds uniform numbers for each attempt: whether, height, width, x, y, which object.
    """
    width, height = wh
    for size, numbers in zip(SIZES, tries_A6, strict=True):
        if numbers[0] < SKIPPED or not class_K:
            continue
        mask_h = _between(1, int(height * size), numbers[1])
        mask_w = _between(1, int(width * size), numbers[2])
        x1 = max(0, _between(0, width, numbers[3]) - mask_w // 2)
        y1 = max(0, _between(0, height, numbers[4]) - mask_h // 2)
        x2, y2 = min(width, x1 + mask_w), min(height, y1 + mask_h)
        if x2 <= x1 + LEAST_SPACE or y2 <= y1 + LEAST_SPACE:
            continue
        if (covered_share(np.array([x1, y1, x2, y2], np.float32), label_T5[:, 1:]) >= MOST_COVERED).any():
            continue
        chosen = _between(0, len(class_K) - 1, numbers[5])
        pasted_wh = paste(chosen, (x1, y1, x2, y2))
        if pasted_wh is not None:
            label = [[class_K[chosen], x1, y1, x1 + pasted_wh[0], y1 + pasted_wh[1]]]
            label_T5 = np.concatenate((label_T5, np.array(label, np.float32)))
    return label_T5


def fitted(space: Space, cut_wh: tuple[int, int]) -> tuple[int, int] | None:
    """Width and height of an object that is scaled to fit into a space; None if that is too small to be seen."""
    scale = min((space[3] - space[1]) / cut_wh[1], (space[2] - space[0]) / cut_wh[0])
    width, height = int(cut_wh[0] * scale), int(cut_wh[1] * scale)
    return None if width <= LEAST_SIDE or height <= LEAST_SIDE else (width, height)


def _between(low: int, high: int, uniform: float) -> int:
    """A whole number from low to high, both included."""
    return low + int(uniform * (high - low + 1))
