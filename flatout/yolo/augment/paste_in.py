"""Objects cut out of other mosaics along their polygons, pasted into a finished picture where they cover little."""

from collections.abc import Iterable
from typing import NamedTuple

import cv2
import numpy as np

from flatout.yolo.augment.copy_paste import MOST_COVERED, covered_share

ENOUGH = 30
"""Cut-outs are collected until there are so many."""
SIZES = (0.75,) * 2 + (0.5,) * 4 + (0.25,) * 4 + (0.125,) * 4 + (0.0625,) * 6
"""Greatest side of a pasted object as a share of the picture's, attempt by attempt."""
SKIPPED = 0.2
LEAST_SPACE, LEAST_SIDE, LEAST_VALUES = 20, 10, 60


class CutOut(NamedTuple):
    """An object without its surroundings."""

    class_number: float
    image: np.ndarray
    """uint8 [h, w, 3], BGR; 0 outside of the polygon."""


def cut_out(canvas: np.ndarray, class_T: np.ndarray, box_T4: np.ndarray, polygons: list[np.ndarray]) -> list[CutOut]:
    """Objects of a canvas uint8 [h, w, 3]; empty ones are left out. Black inside of a polygon becomes white."""
    height, width = canvas.shape[:2]
    found = []
    for class_number, box_4, polygon in zip(class_T, box_T4, polygons, strict=True):
        # Up to the last pixel, which is then left out: a quirk of YOLOv7, pinned by golden paste.npz.
        x1, y1, x2, y2 = (int(value) for value in box_4.clip(0, (width - 1, height - 1) * 2))
        if x2 <= x1 or y2 <= y1:
            continue
        mask = np.zeros((height, width), np.uint8)
        cv2.drawContours(mask, [polygon.astype(np.int32)], -1, 255, cv2.FILLED)
        inside = mask[y1:y2, x1:x2, None] > 0
        image = np.where(inside & (canvas[y1:y2, x1:x2] > 0), canvas[y1:y2, x1:x2], inside.astype(np.uint8) * 255)
        found.append(CutOut(float(class_number), np.ascontiguousarray(image)))
    return found


def collect(rounds: Iterable[list[CutOut]]) -> list[CutOut]:
    """Cut-outs of one round after the other, until there are enough, or none at all."""
    found: list[CutOut] = []
    for of_round in rounds:
        found += of_round
        if not found or len(found) >= ENOUGH:
            break
    return found


def paste_in(image: np.ndarray, label_T5: np.ndarray, cut_outs: list[CutOut], tries_K6: np.ndarray) -> np.ndarray:
    """Paste into uint8 [h, w, 3] in place; returns labels (class, corners in pixels) float32 [T + pasted, 5].

    tries_K6 holds uniform numbers for each attempt: whether, height, width, x, y, which object.
    """
    height, width = image.shape[:2]
    for size, numbers in zip(SIZES, tries_K6, strict=True):
        if numbers[0] < SKIPPED or not cut_outs:
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
        chosen = cut_outs[_between(0, len(cut_outs) - 1, numbers[5])]
        pasted_wh = _paste_one(image[y1:y2, x1:x2], chosen.image)
        if pasted_wh is not None:
            box = (x1, y1, x1 + pasted_wh[0], y1 + pasted_wh[1])
            label_T5 = np.concatenate((label_T5, np.array([[chosen.class_number, *box]], np.float32)))
    return label_T5


def _paste_one(space: np.ndarray, cut: np.ndarray) -> tuple[int, int] | None:
    """Fit a cut-out into a piece of the picture; its width and height there, or None if too little is left of it."""
    scale = min(space.shape[0] / cut.shape[0], space.shape[1] / cut.shape[1])
    w, h = int(cut.shape[1] * scale), int(cut.shape[0] * scale)
    if w <= LEAST_SIDE or h <= LEAST_SIDE:
        return None
    resized = cv2.resize(cut, (w, h))
    is_set = resized > 0
    if np.count_nonzero(is_set) <= LEAST_VALUES:
        return None
    np.copyto(space[:h, :w], resized, where=is_set)
    return w, h


def _between(low: int, high: int, uniform: float) -> int:
    """A whole number from low to high, both included."""
    return low + int(uniform * (high - low + 1))
