"""Evaluates a way to heat maps on whole images: compared with masks, or with boxes.

    images --maps--> heat maps --compared with their masks--> counts of pixels, detections, rows --> DefectEvaluation

Dimension key:  H W image   K dead pixels, or boxes
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.items import read_canonical, read_mask
from flatout.defect.data.pairs import read_boxes
from flatout.defect.evaluate.maps import MapMaker, Mapped, ReadImage, map_images
from flatout.defect.evaluate.scores import (
    DefectEvaluation,
    DetectConfig,
    Detection,
    ImageDetections,
    ImageRow,
    PixelCounts,
    detect,
    rank_scores,
    truth_in_name,
    zero_dead_pixels,
)
from flatout.errors import DataError
from flatout.feed import DecodeError

FINE = DetectConfig(mask_radius=6, max_per_image=50)
"""Separates defects that lie close together; recall@K uses the coarser default."""
MATCH_RADIUS = 3
"""Pixels by which a detection may miss a defect and still count as a hit."""


@dataclass(frozen=True, eq=False)
class EvaluatedImage:
    """An image with its heat map and detections, as observers receive it."""

    image: EvaluationImage
    mapped: Mapped
    mask_HW: np.ndarray | None
    detections: list[Detection]

    @property
    def heat_HW(self) -> np.ndarray:
        return self.mapped.heat_HW

    @property
    def planes_CHW(self) -> np.ndarray:
        return self.mapped.planes_CHW


ImageObserver = Callable[[EvaluatedImage], None]
FindDetections = Callable[[np.ndarray], list[Detection]]
"""Heat map [H, W] -> detections, highest score first."""


# Evaluation


def evaluate_images(
    maker: MapMaker,
    images: Iterable[EvaluationImage],
    *,
    read: ReadImage = read_canonical,
    use_masks: bool = True,
    dead_xy_K2: np.ndarray | None = None,
    threshold: float | None = None,
    observers: Iterable[ImageObserver] = (),
    in_threads: ImageObserver | None = None,
    find: FindDetections | None = None,
    device: torch.device | None = None,
    threads: int | None = None,
) -> DefectEvaluation:
    """Compute the heat map of every image and compare it with its mask, or with its boxes if it has no mask.

    `dead_xy_K2`: dead pixels, around which heat maps are set to 0. `threshold`: None: the one with the best F1 on these
    images, which says nothing about others. `observers` are called with every image, in order, and `in_threads` before
    them, in any order. `find`: finds the detections in a heat map, in threads; None: local maxima. `device` counts the
    pixels for AU-PRO, AP and AUROC; None: the CPU. `threads`: see `map_images`.
    Raises DataError that names an image or mask that cannot be used.
    """
    pixels, tallies, image_detections = PixelCounts(device), list[_Tally](), list[ImageDetections]()
    began_s = time.monotonic()

    def evaluated(image: EvaluationImage, mapped: Mapped) -> EvaluatedImage:
        heat_HW = mapped.heat_HW
        if dead_xy_K2 is not None:
            zero_dead_pixels(heat_HW, dead_xy_K2)
        mask_HW = mask_of_image(image, heat_HW.shape) if use_masks or image.is_good else None
        found = detect(heat_HW, FINE) if find is None else find(heat_HW)
        each = EvaluatedImage(image, mapped, mask_HW, found)
        if in_threads is not None:
            in_threads(each)
        return each

    for each in map_images(images, read, maker, evaluated, threads=threads):
        image, heat_HW = each.image, each.heat_HW
        if each.mask_HW is not None:
            pixels.add(each.mask_HW, heat_HW)
        label = _label_of(image, each.mask_HW, heat_HW.shape, use_boxes=use_masks)
        hits = [(one.score, None if label is None else defect_at(label.number_HW, one)) for one in each.detections]
        num_defects = None if label is None else label.num_defects
        tallies.append(_Tally(image.path.name, num_defects, float(heat_HW.max()), hits))
        if (truth_xy := truth_in_name(image.path.stem)) is not None or image.is_good:
            image_detections.append(ImageDetections(detect(heat_HW), truth_xy))
        for observer in observers:
            observer(each)
    labelled = [tally for tally in tallies if tally.num_defects is not None]
    result = DefectEvaluation(
        pixels=pixels.ranking(),
        images=rank_scores(
            np.array([tally.num_defects for tally in labelled], np.bool_), np.array([tally.peak for tally in labelled])
        ),
        rows=[],
        image_detections=image_detections,
        hits=[
            (score, None if defect is None else (number, defect))
            for number, tally in enumerate(labelled)
            for score, defect in tally.hits
        ],
        num_labelled=len(labelled),
        seconds=time.monotonic() - began_s,
        chosen_threshold=threshold,
    )
    # The threshold is known only now, if it is the one with the best F1.
    return replace(result, rows=[tally.row(result.threshold) for tally in tallies])


class _Tally(NamedTuple):
    """What is kept of an image."""

    name: str
    num_defects: int | None
    """None: it is not labelled."""
    peak: float
    hits: list[tuple[float, int | None]]
    """The score of each detection, and the defect that it hits."""

    def row(self, threshold: float) -> ImageRow:
        on = [defect for score, defect in self.hits if score >= threshold]
        return ImageRow(
            name=self.name,
            is_defective=None if self.num_defects is None else self.num_defects > 0,
            peak=self.peak,
            num_defects=self.num_defects or 0,
            num_found=len(set(on) - {None}),
            num_detections=len(on),
        )


class _Label(NamedTuple):
    """The labelled defects of an image."""

    number_HW: np.ndarray
    """The number of the defect at each pixel, from 1; 0 where there is none."""
    num_defects: int


def _label_of(
    image: EvaluationImage, mask_HW: np.ndarray | None, shape_hw: tuple[int, ...], *, use_boxes: bool
) -> _Label | None:
    if mask_HW is not None:
        return _Label(*number_defects(mask_HW))
    if image.boxes is None or not use_boxes:
        return None
    xyxy_K4 = read_boxes(image.boxes).xyxy_K4
    return _Label(number_boxes(xyxy_K4, shape_hw), len(xyxy_K4))


def number_boxes(xyxy_K4: np.ndarray, shape_hw: tuple[int, ...]) -> np.ndarray:
    """The number of the box at each pixel, from 1, the smallest where several overlap; int64 [H, W].

    Boxes are widened by MATCH_RADIUS, like the defects of masks.
    """
    number_HW = np.zeros(shape_hw, np.int64)
    low_K2 = np.floor(xyxy_K4[:, :2]).astype(np.int64) - MATCH_RADIUS
    high_K2 = np.ceil(xyxy_K4[:, 2:]).astype(np.int64) + MATCH_RADIUS
    for each in np.argsort(-(high_K2 - low_K2).prod(1), kind="stable"):
        (left, top), (right, bottom) = np.maximum(low_K2[each], 0), np.maximum(high_K2[each], 0)
        number_HW[top:bottom, left:right] = each + 1
    return number_HW


def number_defects(mask_HW: np.ndarray) -> tuple[np.ndarray, int]:
    """Label the connected defects of a mask from 1 on, widened by MATCH_RADIUS; int64 [H, W], and their number."""
    import cv2

    count, number_HW = cv2.connectedComponents(mask_HW.astype(np.uint8), connectivity=8)
    side = 2 * MATCH_RADIUS + 1
    widened = cv2.dilate(number_HW.astype(np.float32), cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side)))
    return np.where(number_HW > 0, number_HW, widened.astype(np.int64)), count - 1


def defect_at(number_HW: np.ndarray, found: Detection) -> int | None:
    """Number, from 0, of the defect that a detection hits; None if it hits none."""
    number = int(number_HW[found.y, found.x])
    return number - 1 if number else None


def mask_of_image(image: EvaluationImage, shape_hw: tuple[int, ...]) -> np.ndarray | None:
    """The mask of an image, all False if it is good; None if it has none."""
    if image.is_good:
        return np.zeros(shape_hw, np.bool_)
    if image.mask is None:
        return None
    try:
        mask_HW = read_mask(image.mask)
    except (OSError, DecodeError) as error:
        raise DataError(str(error)) from None
    if mask_HW.shape != shape_hw:
        mask_wh, image_wh = (" x ".join(map(str, reversed(shape))) for shape in (mask_HW.shape, shape_hw))
        raise DataError(
            f"{image.mask}: the mask is {mask_wh} px (width x height), its image {image_wh}. Save the mask at the "
            "size of its image."
        )
    return mask_HW
