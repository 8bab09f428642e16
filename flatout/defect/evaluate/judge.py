"""Judge a network on whole images: heat maps against masks, one image at a time.

Dimension key:  H W image
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.defect.evaluate.detections import (
    DetectConfig,
    Detection,
    Located,
    detect,
    silence_dead_pixels,
    truth_in_name,
)
from flatout.defect.evaluate.outcome import ImageRow, Outcome
from flatout.defect.evaluate.ranking import PixelCounts, rank
from flatout.defect.strips.find import Judged
from flatout.defect.strips.items import read_canonical, read_mask
from flatout.errors import DataError
from flatout.feed.source import DecodeError

FINE = DetectConfig(mask_radius=6, max_per_image=50)
"""For recall of defects that may lie side by side; recall@K has its own, coarser rule."""
MATCH_RADIUS = 3
"""Pixels by which a detection may miss a defect."""


class Seen(NamedTuple):
    """An image after the network; what watchers get."""

    judged: Judged
    planes_CHW: np.ndarray
    heat_HW: np.ndarray
    mask_HW: np.ndarray | None
    detections: list[Detection]


Watcher = Callable[[Seen], None]
MakeMap = Callable[[np.ndarray], np.ndarray]
Read = Callable[[Path], np.ndarray]


def judge(
    make_map: MakeMap,
    images: Iterable[Judged],
    *,
    read: Read = read_canonical,
    use_masks: bool = True,
    dead_xy_K2: np.ndarray | None = None,
    threshold: float | None = None,
    watchers: Iterable[Watcher] = (),
) -> Outcome:
    """Run every image through `make_map` and count. DataError names an image or mask that cannot be used."""
    pixels, tally = PixelCounts(), _Tally()
    began_s = time.monotonic()
    for judged in images:
        planes_CHW, mask_HW = _read(judged, read, use_masks=use_masks)
        heat_HW = make_map(planes_CHW)
        if dead_xy_K2 is not None:
            silence_dead_pixels(heat_HW, dead_xy_K2)
        found = detect(heat_HW, FINE)
        if mask_HW is not None:
            pixels.add(mask_HW, heat_HW)
        tally.add(judged, heat_HW, mask_HW, found)
        for watcher in watchers:
            watcher(Seen(judged, planes_CHW, heat_HW, mask_HW, found))
    known = [row for row in tally.rows if row.is_defective is not None]
    return Outcome(
        pixels=pixels.ranking(),
        images=rank(np.array([row.is_defective for row in known], np.bool_), np.array([row.peak for row in known])),
        rows=tally.rows,
        located=tally.located,
        hits=tally.hits,
        num_judged=len(known),
        seconds=time.monotonic() - began_s,
        chosen_threshold=threshold,
    )


class _Tally:
    """Counts that grow with every image."""

    def __init__(self) -> None:
        self.rows: list[ImageRow] = []
        self.located: list[Located] = []
        self.hits: list[tuple[float, int | None]] = []
        self._num_defects = 0

    def add(self, judged: Judged, heat_HW: np.ndarray, mask_HW: np.ndarray | None, found: list[Detection]) -> None:
        number_HW, num_defects = (np.zeros(heat_HW.shape, np.int64), 0) if mask_HW is None else number_defects(mask_HW)
        on = [defect_at(number_HW, each) for each in found]
        if mask_HW is not None:
            self.hits += [
                (each.score, None if defect is None else self._num_defects + defect)
                for each, defect in zip(found, on, strict=True)
            ]
        self._num_defects += num_defects
        if (truth_xy := truth_in_name(judged.path.stem)) is not None or judged.is_good:
            self.located.append(Located(detect(heat_HW), truth_xy))
        self.rows.append(
            ImageRow(
                name=judged.path.name,
                is_defective=None if mask_HW is None else bool(mask_HW.any()),
                peak=float(heat_HW.max()),
                num_defects=num_defects,
                num_found=len({defect for defect in on if defect is not None}),
                num_detections=len(found),
            )
        )


def number_defects(mask_HW: np.ndarray) -> tuple[np.ndarray, int]:
    """Connected defects of a mask, numbered from 1 on and widened by MATCH_RADIUS, and how many there are."""
    import cv2

    count, number_HW = cv2.connectedComponents(mask_HW.astype(np.uint8), connectivity=8)
    side = 2 * MATCH_RADIUS + 1
    widened = cv2.dilate(number_HW.astype(np.float32), cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side)))
    return np.where(number_HW > 0, number_HW, widened.astype(np.int64)), count - 1


def defect_at(number_HW: np.ndarray, found: Detection) -> int | None:
    """Which defect a detection lies on, from 0; None if on none."""
    number = int(number_HW[found.y, found.x])
    return number - 1 if number else None


def _read(judged: Judged, read: Read, *, use_masks: bool) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        planes_CHW = read(judged.path)
        mask_HW = None
        if judged.is_good:
            mask_HW = np.zeros(planes_CHW.shape[1:], np.bool_)
        elif judged.mask is not None and use_masks:
            mask_HW = read_mask(judged.mask)
    except (OSError, DecodeError) as error:
        raise DataError(str(error)) from None
    if mask_HW is not None and mask_HW.shape != planes_CHW.shape[1:]:
        raise DataError(
            f"{judged.mask}: it measures {' x '.join(map(str, mask_HW.shape))}, its image "
            f"{' x '.join(map(str, planes_CHW.shape[1:]))}."
        )
    return planes_CHW, mask_HW
