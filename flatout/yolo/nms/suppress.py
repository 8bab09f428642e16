"""Non-maximum suppression of a whole batch: candidates, the class shift, suppression, and the rows that remain.

    prediction -> candidates, best first -> boxes moved apart by class -> kernel -> the first max_det of each image

Every kernel gives the boxes a plain greedy loop gives. Memory is bounded by working on as many images at a time as
have SCORES scores together; nothing is dropped for lack of time.

Dimension key:  B images   N boxes of an image   O = 5 + C outputs of a box   M candidates   D boxes kept
"""

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.yolo.nms.candidates import find_candidates
from flatout.yolo.nms.config import NmsConfig
from flatout.yolo.nms.detections import Detections
from flatout.yolo.nms.kernel import float32_at_most, kernel_named
from flatout.yolo.nms.merge import merge_supported

logger = logging.getLogger(__name__)

CLASS_SHIFT_PX = 4096
SCORES = 1 << 25
"""Scores looked at together: 128 MiB in float32, if every box of every image is worth a look."""
SLOW_S = 10


@torch.no_grad()
def non_max_suppression(
    prediction_BNO: Tensor, config: NmsConfig | None = None, *, labels: Sequence[Tensor] | None = None
) -> Detections:
    """Detections in input pixels, from decoded predictions: cx, cy, w, h in input pixels, objectness, classes.

    `labels`, for auto-labelling, are certain boxes: per image [n, 5] of class, cx, cy, w, h in input pixels.
    On a GPU the host waits a few times per call, to learn how many boxes there are.
    """
    begin_s = time.perf_counter()
    config = config or NmsConfig()
    num_images = len(prediction_BNO)
    per_turn = max(1, SCORES // max(1, prediction_BNO.shape[1] * (prediction_BNO.shape[2] - 5)))
    turns = []
    for first in range(0, max(1, num_images), per_turn):
        turn = slice(first, first + per_turn)
        row_D6, image_D = _suppress(prediction_BNO[turn], config, None if labels is None else labels[turn])
        turns.append((row_D6, image_D + first))
    if (elapsed_s := time.perf_counter() - begin_s) > SLOW_S:
        logger.warning(
            "NMS of %d images took %.0f s. An untrained network gives many boxes; a larger conf_thres gives fewer.",
            num_images,
            elapsed_s,
        )
    rows, images = zip(*turns, strict=True)
    return Detections(torch.cat(rows), torch.cat(images), num_images)


def _suppress(prediction_BNO: Tensor, config: NmsConfig, labels: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Kept rows, float32 [D, 6], and the image of each."""
    found = find_candidates(prediction_BNO, config, labels)
    # Added in float32 as YOLOv7 does: far from zero coordinates are coarse, and that decides close calls.
    shift_M = found.class_M.float() * (0 if config.agnostic else CLASS_SHIFT_PX)
    shifted_M4 = found.box_M4 + shift_M[:, None]
    count_B = torch.bincount(found.image_M, minlength=len(prediction_BNO))
    threshold = float32_at_most(config.iou_thres)
    suppress = kernel_named(config.kernel, shifted_M4.device)
    kept_D = suppress(shifted_M4, count_B, threshold, config.max_det)
    columns = (found.box_M4[kept_D], found.score_M[kept_D, None], found.class_M[kept_D, None].float())
    row_D6 = torch.cat(columns, dim=1)
    if config.merge:
        return merge_supported(found, shifted_M4, row_D6, kept_D, count_B, threshold)
    return row_D6, found.image_M[kept_D]
