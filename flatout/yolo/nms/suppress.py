"""Non-maximum suppression of a whole batch, exactly as YOLOv7 does it.

    prediction -> candidates, best first -> boxes shifted by class -> kernel -> the first max_det of each image

Every kernel gives the same boxes as a plain greedy loop. Memory is bounded by processing as many images at a time as
have MAX_SCORES scores together; nothing is dropped for lack of time.

Dimension key:  B images   N boxes of an image   C classes   O = 5 + C outputs of a box: cx cy w h objectness classes
                R rows with enough objectness   K = C or 1 scores of a row (in merging: boxes kept of one image)
                E = R * K scores   L labels   M candidates   n candidates of one image   D boxes kept
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError
from flatout.yolo.boxes import best_first, cxcywh_to_xyxy, pairwise_iou
from flatout.yolo.nms.greedy import float32_at_most, kernel_named

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NmsConfig:
    """Options of non-maximum suppression; the defaults are those of detection."""

    conf_thres: float = 0.25
    """Objectness, and then the score, must be greater than this. Compared in the precision of the prediction."""

    iou_thres: float = 0.45
    """A box is removed if its IoU with a better one of its class is greater than this."""

    multi_label: bool = False
    """One candidate for every class above `conf_thres`, as in evaluation, instead of the best class only."""

    agnostic: bool = False
    """Boxes suppress each other across classes."""

    classes: tuple[int, ...] | None = None
    """Keep only these classes; None keeps all."""

    max_det: int = 300
    """Most boxes per image; the best are kept."""

    max_nms: int = 30_000
    """Most candidates per image; the best are kept."""

    merge: bool = False
    """Replace each box by the mean, weighted by score, of the candidates that overlap it, and drop boxes that only one
    candidate overlaps; in images with 2 to 2999 candidates. YOLOv7 never enables this."""

    kernel: str = "auto"
    """The suppression kernel: "sweep" (NumPy on the host, for any device), "triton" (CUDA), or "auto": triton on CUDA
    if it is installed, else sweep. Both give the same boxes."""

    def __post_init__(self) -> None:
        for name in ("conf_thres", "iou_thres"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"nms.{name}={getattr(self, name)} is outside 0..1.")
        for name in ("max_det", "max_nms"):
            if not 1 <= getattr(self, name) <= 1_000_000:
                raise ConfigError(f"nms.{name}={getattr(self, name)} is outside 1..1000000.")
        if self.kernel not in ("auto", "sweep", "triton"):
            raise ConfigError(f'nms.kernel="{self.kernel}" is unknown. Use auto, sweep or triton.')


class Detections(NamedTuple):
    """Boxes of a batch, sorted by image and by descending score within an image; on one device."""

    row_D6: Tensor
    """float32: x1, y1, x2, y2, score, class."""

    image_D: Tensor
    """int64, the image of each row."""

    num_images: int

    @property
    def box_D4(self) -> Tensor:
        return self.row_D6[:, :4]

    @property
    def score_D(self) -> Tensor:
        return self.row_D6[:, 4]

    @property
    def class_D(self) -> Tensor:
        """int64."""
        return self.row_D6[:, 5].long()

    def per_image(self) -> list[Tensor]:
        """One [n, 6] view per image, [0, 6] without detections. Makes the host wait for the counts."""
        counts = torch.bincount(self.image_D, minlength=self.num_images).tolist()
        return list(self.row_D6.split(counts))


# Suppression

CLASS_SHIFT_PX = 4096
MAX_SCORES = 1 << 25
"""Scores processed at a time: 128 MiB in float32 if every box of every image has enough objectness."""
SLOW_S = 10


@torch.no_grad()
def non_max_suppression(
    prediction_BNO: Tensor, config: NmsConfig | None = None, *, labels: Sequence[Tensor] | None = None
) -> Detections:
    """Detections in input pixels, from decoded predictions: cx, cy, w, h in input pixels, objectness, classes.

    `labels`, for auto-labelling, are boxes added with score 1: per image [n, 5] of class, cx, cy, w, h in input pixels.
    On a GPU the host waits a few times per call for the number of boxes.
    """
    begin_s = time.perf_counter()
    config = config or NmsConfig()
    num_images = len(prediction_BNO)
    per_chunk = max(1, MAX_SCORES // max(1, prediction_BNO.shape[1] * (prediction_BNO.shape[2] - 5)))
    results = []
    for first in range(0, max(1, num_images), per_chunk):
        chunk = slice(first, first + per_chunk)
        row_D6, image_D = _suppress(prediction_BNO[chunk], config, None if labels is None else labels[chunk])
        results.append((row_D6, image_D + first))
    if (elapsed_s := time.perf_counter() - begin_s) > SLOW_S:
        logger.warning(
            "NMS of %d images took %.0f s. An untrained network predicts many boxes; raise conf_thres to get fewer.",
            num_images,
            elapsed_s,
        )
    rows, images = zip(*results, strict=True)
    return Detections(torch.cat(rows), torch.cat(images), num_images)


def _suppress(prediction_BNO: Tensor, config: NmsConfig, labels: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Kept rows, float32 [D, 6], and the image of each."""
    found = find_candidates(prediction_BNO, config, labels)
    # Added in float32 as in YOLOv7: coordinates far from zero are coarse, and that decides close cases.
    shift_M = found.class_M.float() * (0 if config.agnostic else CLASS_SHIFT_PX)
    shifted_M4 = found.box_M4 + shift_M[:, None]
    count_B = torch.bincount(found.image_M, minlength=len(prediction_BNO))
    threshold = float32_at_most(config.iou_thres)
    suppress = kernel_named(config.kernel, shifted_M4.device)
    kept_D = suppress(shifted_M4, count_B, threshold, config.max_det)
    columns = (found.box_M4[kept_D], found.score_M[kept_D, None], found.class_M[kept_D, None].float())
    row_D6 = torch.cat(columns, dim=1)
    if config.merge:
        return merge_boxes(found, shifted_M4, row_D6, kept_D, count_B, threshold)
    return row_D6, found.image_M[kept_D]


# Candidates: one row per box and class with a sufficient score
#
# The arithmetic keeps the precision of the prediction (a half-precision output gives half-precision products and
# corners), because YOLOv7 rounds there; the results are float32.


class Candidates(NamedTuple):
    """Candidates of a batch, sorted by image, then by descending score, then by input order."""

    box_M4: Tensor
    """float32 corners in input pixels."""

    score_M: Tensor
    """float32."""

    class_M: Tensor
    image_M: Tensor


class _Rows(NamedTuple):
    """Boxes with enough objectness, in input order."""

    row_RO: Tensor
    image_R: Tensor


def find_candidates(prediction_BNO: Tensor, config: NmsConfig, labels: Sequence[Tensor] | None = None) -> Candidates:
    """At most `config.max_nms` candidates of each image; `labels` as in `non_max_suppression`."""
    rows = _confident_rows(prediction_BNO, config.conf_thres)
    if labels is not None:
        rows = _with_labels(rows, labels)
    row_RO, image_R = rows
    score_RK, class_RK = _scores(row_RO, config.multi_label)
    wanted_RK = score_RK > config.conf_thres
    if config.classes is not None:
        wanted_RK &= torch.isin(class_RK, torch.tensor(config.classes, device=class_RK.device))
    _limit_candidates(wanted_RK, score_RK, image_R, len(prediction_BNO), config.max_nms)
    position_M = _positions(wanted_RK)
    score_M = score_RK.reshape(-1).index_select(0, position_M).float()
    image_M = image_R.index_select(0, position_M // score_RK.shape[1])
    order_M = best_first(image_M, score_M, len(prediction_BNO))
    position_M = position_M.index_select(0, order_M)
    row_M = position_M // score_RK.shape[1]
    class_M = position_M % score_RK.shape[1] if config.multi_label else class_RK[:, 0].index_select(0, row_M)
    box_R4 = cxcywh_to_xyxy(row_RO[:, :4]).float()
    # Sorting moves no candidate to another image, so image_M stays the same.
    return Candidates(box_R4.index_select(0, row_M), score_M.index_select(0, order_M), class_M, image_M)


def _scores(row_RO: Tensor, multi_label: bool) -> tuple[Tensor, Tensor]:
    """Scores and their classes, of every class or of the best (the first of equal scores), [R, K]."""
    # With a single class the score is the objectness.
    score_RC = row_RO[:, 4:5] if row_RO.shape[1] == 6 else row_RO[:, 5:] * row_RO[:, 4:5]
    if multi_label:
        return score_RC, torch.arange(score_RC.shape[1], device=score_RC.device).expand_as(score_RC)
    score_R1, class_R1 = score_RC.max(1, keepdim=True)
    return score_R1, class_R1


def _confident_rows(prediction_BNO: Tensor, conf_thres: float) -> _Rows:
    position_R = _positions(prediction_BNO[..., 4] > conf_thres)
    row_RO = prediction_BNO.reshape(-1, prediction_BNO.shape[2]).index_select(0, position_R)
    return _Rows(row_RO, position_R // prediction_BNO.shape[1])


def _with_labels(rows: _Rows, labels: Sequence[Tensor]) -> _Rows:
    """Rows with each image's labels after its own rows, with objectness and class probability 1."""
    label_L5 = torch.cat([label.reshape(-1, 5) for label in labels]).to(rows.row_RO)
    counts = torch.tensor([len(label) for label in labels])
    image_L = torch.repeat_interleave(counts).to(rows.image_R)
    row_LO = label_L5.new_zeros(len(label_L5), rows.row_RO.shape[1])
    row_LO[:, :4] = label_L5[:, 1:]
    row_LO[:, 4] = 1
    row_LO.scatter_(1, 5 + label_L5[:, :1].long(), 1)
    image_R, order_R = torch.sort(torch.cat((rows.image_R, image_L)), stable=True)
    return _Rows(torch.cat((rows.row_RO, row_LO))[order_R], image_R)


def _limit_candidates(wanted_RK: Tensor, score_RK: Tensor, image_R: Tensor, num_images: int, max_nms: int) -> None:
    """Unmark all but the `max_nms` highest scores of each image.

    This happens before positions are listed, because a position takes 8 bytes and a mark one.
    """
    if wanted_RK.numel() <= max_nms or int(wanted_RK.count_nonzero()) <= max_nms:
        return
    begins = torch.searchsorted(image_R, torch.arange(num_images + 1, device=image_R.device)).tolist()
    for begin, end in pairwise(begins):
        _keep_highest(wanted_RK[begin:end].view(-1), score_RK[begin:end].reshape(-1), max_nms)


def _keep_highest(wanted_E: Tensor, score_E: Tensor, limit: int) -> None:
    """Unmark all but the `limit` highest scores; of equal scores the first are kept."""
    if len(wanted_E) <= limit or int(wanted_E.count_nonzero()) <= limit:
        return
    score_E = score_E.float().masked_fill(~wanted_E, -1)
    lowest = _nth_highest(score_E, limit)
    torch.ge(score_E, lowest, out=wanted_E)
    surplus = int(wanted_E.count_nonzero()) - limit
    if surplus:
        wanted_E[_positions(score_E == lowest)[-surplus:]] = False


def _nth_highest(score_E: Tensor, rank: int) -> float:
    if not score_E.is_cpu:
        return float(score_E.topk(rank, sorted=False).values.min())
    # Eight times as fast as torch's topk on the host.
    return float(np.partition(score_E.numpy(), len(score_E) - rank)[len(score_E) - rank])


def _positions(mark: Tensor) -> Tensor:
    """Positions in the flattened mask where it is set, ascending int64. On a GPU the host waits."""
    if not mark.is_cpu:
        return mark.reshape(-1).nonzero().flatten()
    # Five times as fast as torch if few are set.
    return torch.from_numpy(np.flatnonzero(mark.numpy()))


# Merging: a box becomes the mean of the candidates that overlap it

MIN_CANDIDATES, MAX_CANDIDATES = 2, 2999


def merge_boxes(
    found: Candidates, shifted_M4: Tensor, row_D6: Tensor, kept_D: Tensor, count_B: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """Rows and images after merging: boxes averaged by score, those that only one candidate overlaps dropped.

    Overlaps are computed from the boxes shifted by class. Works image by image: this mode is for single images.
    """
    image_D = found.image_M[kept_D]
    rows, images = [], []
    end = 0
    for image, count in enumerate(count_B.tolist()):
        begin, end = end, end + count
        row_K6, kept_K = row_D6[image_D == image], kept_D[image_D == image]
        if MIN_CANDIDATES <= count <= MAX_CANDIDATES:
            support_Kn = pairwise_iou(shifted_M4[kept_K], shifted_M4[begin:end]) > threshold
            weight_Kn = support_Kn * found.score_M[None, begin:end]
            mean_K4 = (weight_Kn @ found.box_M4[begin:end]) / weight_Kn.sum(1, keepdim=True)
            row_K6 = torch.cat((mean_K4, row_K6[:, 4:]), dim=1)[support_Kn.sum(1) > 1]
        rows.append(row_K6)
        images.append(torch.full((len(row_K6),), image, device=image_D.device))
    return torch.cat(rows), torch.cat(images)
