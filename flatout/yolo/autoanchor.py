"""Do the network's anchors fit the data set? If not, better ones are searched for before the training begins."""

import logging

import numpy as np
import torch

from flatout.yolo.data.anchors import boxes_at_size, fit_of, search_anchors
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.model.heads import Detect

logger = logging.getLogger(__name__)

LEAST_RECALL = 0.98
"""Share of boxes that an anchor must suit; with less, anchors are searched for."""
JITTER = 0.1
"""The check looks at boxes of pictures that are up to this share smaller or larger, as in training."""


def check_anchors(head: Detect, images: ImageSet, *, size: int, threshold: float, rng: np.random.Generator) -> bool:
    """Replace the anchors of `head` if that lets more boxes be found; True if it was done."""
    size_wh_T2, box_wh_T2 = _boxes(images)
    if not len(box_wh_T2):
        return False
    plain_T2 = boxes_at_size(size_wh_T2, box_wh_T2, size)
    factor_N = rng.uniform(1 - JITTER, 1 + JITTER, len(images))
    jittered_T2 = plain_T2 * np.repeat(factor_N, np.diff(images.labels.first_N))[:, None]
    anchors_A2 = _anchors_px(head)
    fit = fit_of(anchors_A2, jittered_T2, threshold=threshold)
    logger.info("Anchors: %.2f per target, %.4f of all boxes can be found.", fit.above_threshold, fit.best_recall)
    if fit.best_recall >= LEAST_RECALL:
        return False
    try:
        found_A2 = search_anchors(plain_T2, len(anchors_A2), rng, threshold=threshold)
    except ValueError as error:
        logger.warning("The anchors do not fit, but no better ones can be searched for: %s", error)
        return False
    better = fit_of(found_A2, jittered_T2, threshold=threshold)
    if better.best_recall <= fit.best_recall:
        logger.info("Anchors that were searched for are no better (%.4f): the old ones stay.", better.best_recall)
        return False
    set_anchors(head, found_A2)
    logger.info(
        "New anchors, with which %.4f of all boxes can be found; the weights remember them.", better.best_recall
    )
    return True


def set_anchors(head: Detect, anchors_A2: np.ndarray) -> None:
    """Anchors in pixels, smallest first, to the levels from the finest to the coarsest."""
    rising_LA2 = torch.tensor(anchors_A2, dtype=torch.float32).view(head.nl, head.na, 2)
    stride_L = head.stride
    by_stride = torch.argsort(stride_L)
    anchors_LA2 = torch.empty_like(rising_LA2)
    anchors_LA2[by_stride] = rising_LA2
    head.anchor_grid.copy_(anchors_LA2.view_as(head.anchor_grid))
    head.anchors.copy_(anchors_LA2 / stride_L.view(-1, 1, 1))


def _anchors_px(head: Detect) -> np.ndarray:
    pixels: np.ndarray = head.anchor_grid.cpu().numpy().reshape(-1, 2).astype(np.float64)
    return pixels


def _boxes(images: ImageSet) -> tuple[np.ndarray, np.ndarray]:
    """Size of the picture and relative size of the box, for every label."""
    per_picture_N = np.diff(images.labels.first_N)
    return np.repeat(images.size_wh_N2, per_picture_N, axis=0), images.labels.class_box_T5[:, 3:5].astype(np.float64)
