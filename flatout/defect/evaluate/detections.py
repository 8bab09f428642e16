"""Points out of a heat map, and how many true defects are among the best of them.

Dimension key:  H W image   K detections
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Detection(NamedTuple):
    """A place and how sure the network is."""

    y: int
    x: int
    score: float


class DetectConfig(NamedTuple):
    """How points are found."""

    top_pct: float = 0.01
    """Share of an image's pixels that may be the centre of a detection."""
    mask_radius: int = 20
    """Around a detection, no other is looked for."""
    score_window: int = 2
    """Half side of the window that a score is taken from."""
    score_topk: int = 3
    max_per_image: int = 5


DEAD_BEFORE, DEAD_AFTER = 5, 5


def detect(heat_HW: np.ndarray, config: DetectConfig | None = None) -> list[Detection]:
    """The highest places one after the other, each away from those before it; the first in rows wins a tie."""
    config = config or DetectConfig()
    allowed_HW = heat_HW >= np.percentile(heat_HW, 100 * (1 - config.top_pct))
    y_H, x_W = np.ogrid[: heat_HW.shape[0], : heat_HW.shape[1]]
    found: list[Detection] = []
    while len(found) < config.max_per_image and allowed_HW.any():
        y, x = divmod(int(np.argmax(np.where(allowed_HW, heat_HW, -np.inf))), heat_HW.shape[1])
        found.append(Detection(y, x, score_at(heat_HW, y, x, config)))
        allowed_HW &= (y_H - y) ** 2 + (x_W - x) ** 2 > config.mask_radius**2
    return found


def score_at(heat_HW: np.ndarray, y: int, x: int, config: DetectConfig) -> float:
    """Mean of the largest values around a place; float64."""
    reach = config.score_window
    window = heat_HW[max(y - reach, 0) : y + reach + 1, max(x - reach, 0) : x + reach + 1]
    return float(np.sort(window, axis=None)[-config.score_topk :].astype(np.float64).mean())


class Located(NamedTuple):
    """An image's detections and the one defect that is known in it, if any."""

    detections: Sequence[Detection]
    truth_xy: tuple[float, float] | None


def recall_at(images: Sequence[Located], nums: Sequence[int], *, match_radius: float = 3.0) -> Mapping[int, float]:
    """Share of the known defects among the K best detections of all images, for each K; empty if none is known."""
    num_known = sum(image.truth_xy is not None for image in images)
    if not num_known:
        return {}
    pooled = [
        (found.score, number, _hits(image, found, match_radius))
        for number, image in enumerate(images)
        for found in image.detections
    ]
    pooled.sort(key=lambda entry: -entry[0])  # stable: equal scores stay in the order of the images
    return {num: len({number for _, number, hit in pooled[:num] if hit}) / num_known for num in nums}


def _hits(image: Located, found: Detection, match_radius: float) -> bool:
    if image.truth_xy is None:
        return False
    x, y = image.truth_xy
    return bool(np.hypot(found.x - x, found.y - y) <= match_radius)


def truth_in_name(stem: str) -> tuple[float, float] | None:
    """The defect's place (x, y) at the end of a name like `strip_17#88,412`."""
    _, mark, text = stem.rpartition("#")
    parts = text.split(",")
    if not mark or len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        return None
    return float(parts[0]), float(parts[1])


def silence_dead_pixels(heat_HW: np.ndarray, dead_xy_K2: np.ndarray) -> None:
    """Set a box of ten by ten around each dead pixel to 0, in place."""
    for x, y in dead_xy_K2.tolist():
        heat_HW[max(y - DEAD_BEFORE, 0) : max(y + DEAD_AFTER, 0), max(x - DEAD_BEFORE, 0) : max(x + DEAD_AFTER, 0)] = 0


def recall_at_false_positives(
    hits: Sequence[tuple[float, int | None]], *, num_defects: int, num_images: int, per_image: float
) -> float | None:
    """Share of defects found before there are more than so many false detections per image.

    `hits`: score and the number of the defect each detection lies on, None if on none.
    """
    if not num_defects:
        return None
    found: set[int] = set()
    false = 0
    for _, defect in sorted(hits, key=lambda entry: -entry[0]):
        if defect is None:
            false += 1
            if false > per_image * num_images:
                break
        else:
            found.add(defect)
    return len(found) / num_defects
