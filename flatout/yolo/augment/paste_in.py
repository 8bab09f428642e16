"""Objects cut out of other mosaics along their polygons, pasted into a finished picture where they cover little."""

from collections.abc import Iterable
from typing import NamedTuple

import cv2
import numpy as np

from flatout.yolo.augment.paste_plan import ENOUGH, LEAST_VALUES, Space, fitted, paste_all


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
    """Paste into uint8 [h, w, 3] in place; returns labels (class, corners in pixels) float32 [T + pasted, 5]."""

    def paste(number: int, space: Space) -> tuple[int, int] | None:
        x1, y1, x2, y2 = space
        return _paste_one(image[y1:y2, x1:x2], cut_outs[number].image)

    classes = [cut.class_number for cut in cut_outs]
    return paste_all((image.shape[1], image.shape[0]), label_T5, classes, tries_K6, paste)


def _paste_one(space: np.ndarray, cut: np.ndarray) -> tuple[int, int] | None:
    """Fit a cut-out into a piece of the picture; its width and height there, or None if too little is left of it."""
    wh = fitted((0, 0, space.shape[1], space.shape[0]), (cut.shape[1], cut.shape[0]))
    if wh is None:
        return None
    resized = cv2.resize(cut, wh)
    is_set = resized > 0
    if np.count_nonzero(is_set) <= LEAST_VALUES:
        return None
    np.copyto(space[: wh[1], : wh[0]], resized, where=is_set)
    return wh
