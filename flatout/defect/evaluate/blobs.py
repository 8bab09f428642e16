"""Blobs: connected components of a heat map at a threshold, compared with labelled defects.

    heat map, threshold --> blobs --on a labelled defect--> hits; the others are false --> scores at the threshold

Users of inspection decide by blobs: an image passes if it has none. Labelled defects are the boxes that people drew, if
there are any, else the connected regions of a mask.

Dimension key:  H W image   N blobs   M pixels in blobs   K boxes
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from flatout.defect.data.pairs import Boxes
from flatout.defect.evaluate.evaluate import number_defects


class Blob(NamedTuple):
    """A connected component of the pixels at or above the threshold."""

    x1: int
    y1: int
    x2: int
    y2: int
    """Box in pixels; x2 and y2 are the first column and row after it."""
    area_px: int
    score: float
    """Highest heat in it."""
    hits: tuple[int, ...] = ()
    """Numbers, from 0, of the labelled defects of the image that it is on.

    Regions of a mask: those within MATCH_RADIUS of one of its pixels. Boxes: those that its own box overlaps.
    """


class Region(NamedTuple):
    """The box of a labelled defect, inside the image, and its number of pixels (those of a labelled box: its area)."""

    x1: int
    y1: int
    x2: int
    y2: int
    area_px: int


class BlobImage(NamedTuple):
    """The blobs of one image, and how they compare with its label."""

    blobs: list[Blob]
    """Highest score first."""
    is_labelled: bool
    num_defects: int
    missed: list[Region]
    """Largest first."""
    class_hits: list[tuple[int, bool]]
    """The class of every box that has one, and whether a blob is on it."""
    hit_px: int
    """Pixels at or above the threshold that are labelled as defect; the next two count the other pixels."""
    false_px: int
    missed_px: int

    @property
    def verdict(self) -> str:
        return "fail" if self.blobs else "pass"

    @property
    def false_blobs(self) -> list[Blob]:
        """Those that hit no labelled defect; empty if the image is not labelled."""
        return [blob for blob in self.blobs if not blob.hits] if self.is_labelled else []


def inspect_blobs(
    heat_HW: np.ndarray, threshold: float, mask_HW: np.ndarray | None = None, boxes: Boxes | None = None
) -> BlobImage:
    """Find the blobs of a heat map and compare them with labels, if there are any."""
    number_HW, blobs = _components(heat_HW, threshold)
    regions: list[Region] = []
    hits: list[tuple[int, ...]] = [()] * len(blobs)
    classes: list[int] = []
    if boxes is not None:
        regions, hits = _box_hits(blobs, boxes.xyxy_K4, (heat_HW.shape[0], heat_HW.shape[1]))
        classes = boxes.class_K.tolist()
    elif mask_HW is not None:
        regions, hits = _mask_hits(number_HW, len(blobs), mask_HW)
    found = {defect for on in hits for defect in on}
    on_HW = number_HW > 0
    hit_px = 0 if mask_HW is None else int((on_HW & mask_HW).sum())
    return BlobImage(
        blobs=sorted(
            (blob._replace(hits=on) for blob, on in zip(blobs, hits, strict=True)), key=lambda one: -one.score
        ),
        is_labelled=mask_HW is not None or boxes is not None,
        num_defects=len(regions),
        missed=sorted(
            (each for number, each in enumerate(regions) if number not in found), key=lambda each: -each.area_px
        ),
        class_hits=[(kind, number in found) for number, kind in enumerate(classes) if kind >= 0],
        hit_px=hit_px,
        false_px=0 if mask_HW is None else int(on_HW.sum()) - hit_px,
        missed_px=0 if mask_HW is None else int(mask_HW.sum()) - hit_px,
    )


def blob_scores(images: Sequence[BlobImage], ranked: Sequence[BlobImage] | None = None) -> dict[str, float | None]:
    """Scores of labelled images at the threshold; those that cannot be computed are None.

    `ranked`: the same images with all their blobs, for the average precision; None: those at the threshold.
    """
    labelled = [image for image in images if image.is_labelled]
    hit, false, missed = (
        sum(getattr(image, name) for image in labelled) for name in ("hit_px", "false_px", "missed_px")
    )
    num_defects = sum(image.num_defects for image in labelled)
    num_missed = sum(len(image.missed) for image in labelled)
    failed = [(image.num_defects > 0, bool(image.blobs)) for image in labelled]
    num_false = sum(len(image.false_blobs) for image in labelled)
    return {
        "pixel_F1": _f1(hit, false, missed),
        "image_F1": _f1(failed.count((True, True)), failed.count((False, True)), failed.count((True, False))),
        "blob_AP": blob_average_precision([image for image in ranked or images if image.is_labelled]),
        "blob_recall": (num_defects - num_missed) / num_defects if num_defects else None,
        "false_blobs_per_image": num_false / len(labelled) if labelled else None,
        **recall_by_class(labelled),
    }


def recall_by_class(images: Sequence[BlobImage]) -> dict[str, float]:
    """Share of the boxes of each class that a blob is on, by `blob_recall[class N]`; empty without classes."""
    pooled = [pair for image in images for pair in image.class_hits]
    by_class = {
        kind: [is_hit for other, is_hit in pooled if other == kind] for kind in sorted({kind for kind, _ in pooled})
    }
    return {f"blob_recall[class {kind}]": sum(hits) / len(hits) for kind, hits in by_class.items()}


def blob_average_precision(images: Sequence[BlobImage]) -> float | None:
    """Average precision of all blobs, ranked by their score; None without defects.

    Precision is the share of blobs that hit a defect, recall the share of defects that are hit. A second blob on the
    same defect is neither a hit nor false: a defect that is drawn in two parts is no false alarm.
    """
    num_defects = sum(image.num_defects for image in images)
    if not num_defects:
        return None
    ranked = sorted(
        ((blob, number) for number, image in enumerate(images) for blob in image.blobs), key=lambda one: -one[0].score
    )
    found: set[tuple[int, int]] = set()
    num_true = num_false = 0
    area = 0.0
    # Blobs of one score enter together, since their order would be arbitrary.
    for _, together in groupby(ranked, key=lambda one: one[0].score):
        before = len(found)
        for blob, image in together:
            new = {(image, defect) for defect in blob.hits} - found
            num_true += bool(new)
            num_false += not blob.hits
            found |= new
        area += (len(found) - before) * num_true / (num_true + num_false)
    return area / num_defects


def _components(heat_HW: np.ndarray, threshold: float) -> tuple[np.ndarray, list[Blob]]:
    """Number of the blob at each pixel, from 1, 0 outside of blobs, int32 [H, W]; and the blobs in that order."""
    on_HW = heat_HW >= threshold
    number_HW, regions = _regions(on_HW)
    score_N = np.zeros(1 + len(regions), heat_HW.dtype)
    np.maximum.at(score_N, number_HW[on_HW], heat_HW[on_HW])
    return number_HW, [Blob(*region, score) for region, score in zip(regions, score_N[1:].tolist(), strict=True)]


def _mask_hits(
    number_HW: np.ndarray, num_blobs: int, mask_HW: np.ndarray
) -> tuple[list[Region], list[tuple[int, ...]]]:
    """The regions of a mask, and for every blob the numbers of those that it is on."""
    defect_HW, _ = number_defects(mask_HW)
    y_M, x_M = np.nonzero((number_HW > 0) & (defect_HW > 0))
    pairs = np.unique(np.stack((number_HW[y_M, x_M], defect_HW[y_M, x_M])), axis=1).T
    hits = [tuple((pairs[pairs[:, 0] == blob, 1] - 1).tolist()) for blob in range(1, num_blobs + 1)]
    return _regions(mask_HW)[1], hits


def _box_hits(
    blobs: Sequence[Blob], xyxy_K4: np.ndarray, shape_hw: tuple[int, int]
) -> tuple[list[Region], list[tuple[int, ...]]]:
    """The labelled boxes, and for every blob the numbers of those that its box overlaps."""
    blob_N4 = np.array([blob[:4] for blob in blobs], np.float64).reshape(-1, 4)
    overlaps_NK2 = (blob_N4[:, None, :2] < xyxy_K4[:, 2:]) & (blob_N4[:, None, 2:] > xyxy_K4[:, :2])
    regions = []
    for x1, y1, x2, y2 in xyxy_K4.tolist():
        left, right = (min(max(math.floor(x1), 0), shape_hw[1] - 1), min(math.ceil(x2), shape_hw[1]))
        top, bottom = (min(max(math.floor(y1), 0), shape_hw[0] - 1), min(math.ceil(y2), shape_hw[0]))
        regions.append(Region(left, top, max(right, left + 1), max(bottom, top + 1), round((x2 - x1) * (y2 - y1))))
    return regions, [tuple(np.flatnonzero(row_K).tolist()) for row_K in np.asarray(overlaps_NK2.all(2))]


def _regions(on_HW: np.ndarray) -> tuple[np.ndarray, list[Region]]:
    """Number of the connected region at each pixel, from 1, int32 [H, W]; and the regions in that order."""
    import cv2

    _, number_HW, facts, _ = cv2.connectedComponentsWithStats(on_HW.astype(np.uint8), connectivity=8)
    boxes = facts[1:].tolist()
    regions = [Region(left, top, left + width, top + height, area) for left, top, width, height, area in boxes]
    return np.asarray(number_HW, np.int32), regions


def _f1(hits: int, false: int, missed: int) -> float | None:
    """F1 from counts; None if nothing is labelled as positive."""
    return 2 * hits / (2 * hits + false + missed) if hits + missed else None
