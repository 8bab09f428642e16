"""Non-maximum suppression of a whole batch, exactly as YOLOv7 does it.

    prediction -> rows with enough objectness -> candidates, best first -> boxes shifted by class -> kernel -> the first
    max_det of each image

Every kernel gives the same boxes as a plain greedy loop. Memory is bounded by processing as many images at a time as
have MAX_SCORES scores together; nothing is dropped for lack of time. On a GPU the host waits a few times per call and
per such group of images, never per image.

Dimension key:  B images   N boxes of an image   C classes   O = 5 + C outputs of a box: cx cy w h objectness classes
                R rows with enough objectness   K = C or 1 scores of a row (in merging: boxes kept of one image)
                E = R * K scores   L labels   M candidates   n candidates of one image   D boxes kept
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.errors import ConfigError
from flatout.yolo.boxes import best_first, cxcywh_to_xyxy, pairwise_iou, positions
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
        if self.classes is not None and any(isinstance(each, str) for each in self.classes):
            raise ConfigError(f"nms.classes={self.classes}: classes are given by their numbers, from 0, not by names.")


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
"""Scores of rows with enough objectness that are processed at a time: 128 MiB in float32."""
SLOW_S = 10


@torch.no_grad()
def non_max_suppression(
    prediction_BNO: Tensor, config: NmsConfig | None = None, *, labels: Sequence[Tensor] | None = None
) -> Detections:
    """Detections in input pixels, from decoded predictions: cx, cy, w, h in input pixels, objectness, classes.

    `labels`, for auto-labelling, are boxes added with score 1: per image [n, 5] of class, cx, cy, w, h in input pixels.
    """
    begin_s = time.perf_counter()
    config = config or NmsConfig()
    if not isinstance(prediction_BNO, Tensor) or prediction_BNO.ndim != 3 or prediction_BNO.shape[2] < 6:
        got = list(prediction_BNO.shape) if isinstance(prediction_BNO, Tensor) else f"a {type(prediction_BNO).__name__}"
        raise ConfigError(
            f"non_max_suppression got {got} instead of a tensor [images, boxes, 5 + classes]: centre and size in "
            "pixels, objectness, one probability per class."
        )
    num_images = len(prediction_BNO)
    results = []
    for first, rows in _confident_rows(prediction_BNO, config.conf_thres):
        if labels is not None:
            rows = _with_labels(rows, labels[first : first + len(rows.counts)])
        row_D6, image_D = _suppress(rows, config)
        results.append((row_D6, image_D + first))
    if (elapsed_s := time.perf_counter() - begin_s) > SLOW_S:
        logger.warning(
            "NMS of %d images took %.0f s. An untrained network predicts many boxes; raise conf_thres to get fewer.",
            num_images,
            elapsed_s,
        )
    kept, images = zip(*results, strict=True)
    return Detections(torch.cat(kept), torch.cat(images), num_images)


def _suppress(rows: "Rows", config: NmsConfig) -> tuple[Tensor, Tensor]:
    """Kept rows, float32 [D, 6], and the image of each."""
    found = find_candidates(rows, config)
    # Added in float32 as in YOLOv7: coordinates far from zero are coarse, and that decides close cases.
    shift_M = found.class_M.float() * (0 if config.agnostic else CLASS_SHIFT_PX)
    shifted_M4 = found.box_M4 + shift_M[:, None]
    count_B = _begins(found.image_M, len(rows.counts)).diff()
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


class Rows(NamedTuple):
    """Boxes with enough objectness of some images, in input order."""

    row_RO: Tensor
    image_R: Tensor
    counts: list[int]
    """Of each image, on the host."""


def find_candidates(rows: Rows, config: NmsConfig) -> Candidates:
    """At most `config.max_nms` candidates of each image."""
    row_RO, image_R, counts = rows
    score_RK, class_RK = _scores(row_RO, config.multi_label)
    wanted_RK = score_RK > config.conf_thres
    if config.classes is not None:
        wanted_RK &= torch.isin(class_RK, torch.tensor(config.classes, device=class_RK.device))
    too_many = _limit_candidates(wanted_RK, score_RK, rows, config.max_nms)
    position_M = positions(wanted_RK)
    score_M = score_RK.reshape(-1).index_select(0, position_M).float()
    image_M = image_R.index_select(0, position_M // score_RK.shape[1])
    order_M = best_first(image_M, score_M, len(counts))
    if too_many:
        # Sorting moves no candidate to another image, so image_M stays the same.
        rank_M = torch.arange(len(order_M), device=order_M.device) - _begins(image_M, len(counts))[image_M]
        first_M = positions(rank_M < config.max_nms)
        order_M, image_M = order_M.index_select(0, first_M), image_M.index_select(0, first_M)
    position_M = position_M.index_select(0, order_M)
    row_M = position_M // score_RK.shape[1]
    class_M = position_M % score_RK.shape[1] if config.multi_label else class_RK[:, 0].index_select(0, row_M)
    box_R4 = cxcywh_to_xyxy(row_RO[:, :4]).float()
    return Candidates(box_R4.index_select(0, row_M), score_M.index_select(0, order_M), class_M, image_M)


def _scores(row_RO: Tensor, multi_label: bool) -> tuple[Tensor, Tensor]:
    """Scores and their classes, of every class or of the best (the first of equal scores), [R, K]."""
    # With a single class the score is the objectness.
    score_RC = row_RO[:, 4:5] if row_RO.shape[1] == 6 else row_RO[:, 5:] * row_RO[:, 4:5]
    if multi_label:
        return score_RC, torch.arange(score_RC.shape[1], device=score_RC.device).expand_as(score_RC)
    score_R1, class_R1 = score_RC.max(1, keepdim=True)
    return score_R1, class_R1


def _confident_rows(prediction_BNO: Tensor, conf_thres: float) -> Iterator[tuple[int, Rows]]:
    """Rows with enough objectness, of as many images at a time as have MAX_SCORES scores; with the first image."""
    num_boxes, num_outputs = prediction_BNO.shape[1:]
    confident_BN = prediction_BNO[..., 4] > conf_thres
    counts = confident_BN.sum(1).tolist()
    position_R = positions(confident_BN)
    flat_PO = prediction_BNO.reshape(-1, num_outputs)
    end_R = 0
    for first, last in _groups([count * (num_outputs - 5) for count in counts], MAX_SCORES):
        begin_R, end_R = end_R, end_R + sum(counts[first:last])
        own_R = position_R[begin_R:end_R]
        yield first, Rows(flat_PO.index_select(0, own_R), own_R // num_boxes - first, counts[first:last])


def _groups(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Begin and end of consecutive items whose sizes do not exceed the limit together, unless one does by itself."""
    begin, size = 0, 0
    for item, each in enumerate(sizes):
        if size + each > limit and item > begin:
            yield begin, item
            begin, size = item, 0
        size += each
    yield begin, len(sizes)


def _with_labels(rows: Rows, labels: Sequence[Tensor]) -> Rows:
    """Rows with each image's labels after its own rows, with objectness and class probability 1."""
    label_L5 = torch.cat([label.reshape(-1, 5) for label in labels]).to(rows.row_RO)
    counts = [len(label) for label in labels]
    image_L = torch.repeat_interleave(torch.tensor(counts)).to(rows.image_R)
    row_LO = label_L5.new_zeros(len(label_L5), rows.row_RO.shape[1])
    row_LO[:, :4] = label_L5[:, 1:]
    row_LO[:, 4] = 1
    row_LO.scatter_(1, 5 + label_L5[:, :1].long(), 1)
    image_R, order_R = torch.sort(torch.cat((rows.image_R, image_L)), stable=True)
    return Rows(torch.cat((rows.row_RO, row_LO))[order_R], image_R, list(map(add, rows.counts, counts)))


def _limit_candidates(wanted_RK: Tensor, score_RK: Tensor, rows: Rows, max_nms: int) -> bool:
    """Unmark scores that are certainly not among the `max_nms` highest of their image.

    Returns whether an image may still have more. This happens before positions are listed, because a position takes 8
    bytes and a mark one.
    """
    if max(rows.counts, default=0) * wanted_RK.shape[1] <= max_nms:
        return False
    unmark = _unmark_on_host if wanted_RK.is_cpu else _unmark_on_device
    return unmark(wanted_RK, score_RK, rows, max_nms)


def _unmark_on_host(wanted_RK: Tensor, score_RK: Tensor, rows: Rows, max_nms: int) -> bool:
    """Image by image: all below the `max_nms`-th highest score."""
    too_many, wanted = False, wanted_RK.numpy()
    for begin, end in pairwise([0, *accumulate(rows.counts)]):
        if np.count_nonzero(wanted[begin:end]) > max_nms:
            too_many = True
            score_nK = score_RK[begin:end].float().masked_fill(~wanted_RK[begin:end], -1).numpy()
            # Eight times as fast as torch's topk on the host.
            lowest = np.partition(score_nK, score_nK.size - max_nms, axis=None)[score_nK.size - max_nms]
            np.greater_equal(score_nK, lowest, out=wanted[begin:end])
    return too_many


LOWEST, HIGHEST = 0, 0x3F800001
"""Bits of the float32 numbers 0 and just above 1. Those of scores lie between them, and sort like the scores."""
HALVINGS = 13
"""Of that range: what remains is a sixty-fourth of a factor of two."""


def _unmark_on_device(wanted_RK: Tensor, score_RK: Tensor, rows: Rows, max_nms: int) -> bool:
    """All images at once: all below a score that at least `max_nms` reach, found by halving the range of scores.

    A few more than `max_nms` remain, and the host waits once. Selecting exactly takes several launches per image.
    """
    begin_B = torch.tensor([0, *accumulate(rows.counts)], device=wanted_RK.device)
    if max(_num_set(wanted_RK, begin_B).tolist()) <= max_nms:
        return False
    score_RK = score_RK.float().masked_fill(~wanted_RK, -1)
    low_B = torch.full((len(rows.counts),), LOWEST, dtype=torch.int32, device=wanted_RK.device)
    high_B = torch.full_like(low_B, HIGHEST)
    for _ in range(HALVINGS):
        middle_B = (low_B + high_B) // 2
        reach_RK = score_RK >= middle_B.view(torch.float32)[rows.image_R, None]
        is_reached_B = _num_set(reach_RK, begin_B) >= max_nms
        low_B, high_B = torch.where(is_reached_B, middle_B, low_B), torch.where(is_reached_B, high_B, middle_B)
    wanted_RK &= score_RK >= low_B.view(torch.float32)[rows.image_R, None]
    return True


def _num_set(mark_RK: Tensor, begin_B: Tensor) -> Tensor:
    """How many marks of each image are set, int64 [B]; `begin_B` is where its rows begin, then the end of all."""
    return F.pad(mark_RK.sum(1).cumsum(0), (1, 0))[begin_B].diff()


def _begins(image_M: Tensor, num_images: int) -> Tensor:
    """Where each image begins in a list sorted by image, int64 [num_images + 1]; the last is the end of the list."""
    return torch.searchsorted(image_M, torch.arange(num_images + 1, device=image_M.device))


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
