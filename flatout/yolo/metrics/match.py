"""Matching of detections with labels, and the evaluator that collects the matches of all batches.

    detections + targets of a batch -> pixels of the original images -> matched on the device: a few bytes per detection
    all batches -> result(): sorted on the device, AP per class on the host

A detection is compared only with the label of its image and class that it overlaps most. If several detections choose
the same label, the most confident one matches it; the others are not offered another label. So the choice of one
detection does not depend on the others, and a whole batch is matched at once, on its own device.

Dimension key:  B images   D detections, by descending score in each image   L labels   K overlap thresholds   T targets
                P pairs of a detection and a label of its image   C classes   S confident detections
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.errors import DataError
from flatout.yolo.boxes import Letterbox, cxcywh_to_xyxy, first_per_list, max_per_list, pairs_of_equal_key, to_native
from flatout.yolo.metrics.evaluation import Evaluation, mean_scores, rank_detections, score_ranked
from flatout.yolo.nms.suppress import Detections

IOU_THRESHOLDS = tuple(torch.linspace(0.5, 0.95, 10).tolist())
"""Ten float32 numbers; the IoU must be greater."""


class Labels(NamedTuple):
    """Labelled boxes of a batch, on one device."""

    box_L4: Tensor
    """float32 corners in pixels of the original image."""

    class_L: Tensor
    image_L: Tensor


class Matches(NamedTuple):
    """The matches of one or more batches, as AP needs them."""

    correct_DK: Tensor
    score_D: Tensor
    class_D: Tensor
    label_class_L: Tensor


class Evaluator:
    """Collects batches and computes an `Evaluation`. Keeps about 20 bytes per detection on the device until then."""

    def __init__(self, num_classes: int, *, confusion: bool = False, v5_metric: bool = False) -> None:
        """`confusion` also computes a confusion matrix; `v5_metric` extends recall curves to 1."""
        self.num_classes = num_classes
        self.confusion = ConfusionMatrix(num_classes) if confusion else None
        self._v5_metric = v5_metric
        self.batches: list[Matches] = []
        """In the order of `update`. With several ranks, their batches are gathered here (evaluate/run.py)."""
        self.num_images = 0

    @torch.no_grad()
    def update(
        self, found: Detections, target_T6: Tensor, letterbox: Letterbox, input_hw: tuple[int, int]
    ) -> Detections:
        """Match a batch; returns its detections in pixels of the original images, clipped, for a COCO file or plots.

        `found` is in input pixels, `target_T6` has image, class, cx, cy, w, h normalised to the input (a negative image
        marks padding); everything must be on one device.
        """
        if not isinstance(target_T6, Tensor) or target_T6.ndim != 2 or target_T6.shape[1] != 6:
            raise DataError(
                "Targets must be a tensor [T, 6] of image, class, cx, cy, w, h, divided by the input's size."
            )
        if len(letterbox.gain_B) != found.num_images:
            raise DataError(
                f"The letterbox is of {len(letterbox.gain_B)} images, the detections of {found.num_images}."
            )
        box_D4 = to_native(found.box_D4, found.image_D, letterbox)
        found = found._replace(row_D6=torch.cat((box_D4, found.row_D6[:, 4:]), dim=1))
        labels = labels_in_images(target_T6, letterbox, input_hw)
        correct_DK = match_to_labels(found, labels)
        self.batches.append(Matches(correct_DK, found.score_D, found.class_D, labels.class_L))
        self.num_images += found.num_images
        if self.confusion is not None:
            self.confusion.update(found, labels)
        return found

    def matches(self) -> Matches:
        """All batches so far, on the host, which waits for the device."""
        return Matches(*(column.cpu() for column in self._all()))

    def result(self) -> Evaluation:
        """The evaluation of all batches so far; more may follow. The host waits for the device."""
        correct_DK, score_D, class_D, label_class = self._all()
        found = rank_detections(correct_DK, score_D, class_D)
        label_class_L = label_class.cpu().numpy()
        self._check(label_class_L)
        # YOLOv7 reports no class at all if no detection is correct at any threshold.
        scored_L = label_class_L if len(found.hit_H) else label_class_L[:0]
        classes = score_ranked(found, scored_L, v5_metric=self._v5_metric)
        return Evaluation(
            num_images=self.num_images,
            num_labels=len(label_class_L),
            num_classes=self.num_classes,
            scores=mean_scores(classes),
            classes=classes,
            confusion=None if self.confusion is None else self.confusion.counts().numpy(),
        )

    def _all(self) -> Matches:
        if not self.batches:
            nothing = torch.zeros(0)
            return Matches(torch.zeros(0, len(IOU_THRESHOLDS)).bool(), nothing, nothing.long(), nothing.long())
        return Matches(*(torch.cat(column) for column in zip(*self.batches, strict=True)))

    def _check(self, label_class_L: np.ndarray) -> None:
        if len(label_class_L) and not 0 <= label_class_L.min() <= label_class_L.max() < self.num_classes:
            bad = [number for number in np.unique(label_class_L).tolist() if not 0 <= number < self.num_classes]
            raise DataError(
                f"Labels have classes {bad}, but the network has {self.num_classes} (0..{self.num_classes - 1}). "
                "Check nc in the data file."
            )


# Matching


def labels_in_images(target_T6: Tensor, letterbox: Letterbox, input_hw: tuple[int, int]) -> Labels:
    """Labels in pixels of the original images, from targets: image, class, cx, cy, w, h normalised to the input.

    Targets with a negative image are padding.
    """
    target_L6 = target_T6[target_T6[:, 0] >= 0].float()
    height, width = input_hw
    scale = torch.tensor([width, height, width, height], dtype=torch.float32, device=target_L6.device)
    image_L = target_L6[:, 0].long()
    box_L4 = to_native(cxcywh_to_xyxy(target_L6[:, 2:] * scale), image_L, letterbox)
    return Labels(box_L4, target_L6[:, 1].long(), image_L)


def match_to_labels(found: Detections, labels: Labels) -> Tensor:
    """Whether each detection is correct at each of IOU_THRESHOLDS, bool [D, K].

    Detections and labels must be in the same pixel coordinates.
    """
    num_found, num_labels = len(found.image_D), len(labels.image_L)
    class_D = found.class_D
    if not num_found or not num_labels:
        return torch.zeros((num_found, len(IOU_THRESHOLDS)), dtype=torch.bool, device=class_D.device)
    # Larger than any class, so that every pair of image and class has its own key.
    stride = torch.maximum(class_D.max(), labels.class_L.max()) + 1
    found_P, label_P = pairs_of_equal_key(found.image_D * stride + class_D, labels.image_L * stride + labels.class_L)
    iou_P = iou_of_pairs(found.box_D4.index_select(0, found_P), labels.box_L4.index_select(0, label_P))
    best_D, label_D = best_partner(iou_P, found_P, label_P, num_found, num_labels)
    hit_D = (best_D > IOU_THRESHOLDS[0]).nonzero().flatten()
    first_L = first_per_list(hit_D, label_D[hit_D], num_labels, absent=num_found)
    correct_D = torch.zeros(num_found + 1, dtype=torch.bool, device=best_D.device).index_fill_(0, first_L, True)[:-1]
    thresholds_K = torch.tensor(IOU_THRESHOLDS, device=best_D.device)
    return correct_D[:, None] & (best_D[:, None] > thresholds_K)


def best_partner(
    iou_P: Tensor, one_P: Tensor, other_P: Tensor, num_ones: int, num_others: int
) -> tuple[Tensor, Tensor]:
    """For each of `one`, its largest overlap, and which of `other` it is with (first of equals; num_others if none)."""
    best = max_per_list(iou_P, one_P, num_ones)
    is_best = (iou_P == best.index_select(0, one_P)).nonzero().flatten()
    return best, first_per_list(other_P[is_best], one_P[is_best], num_ones, absent=num_others)


def iou_of_pairs(box_P4: Tensor, other_P4: Tensor) -> Tensor:
    """IoU of P pairs of boxes given by corners, [P]; without an epsilon."""
    low_P2, high_P2 = torch.maximum(box_P4[:, :2], other_P4[:, :2]), torch.minimum(box_P4[:, 2:], other_P4[:, 2:])
    inter_P = (high_P2 - low_P2).clamp_(min=0).prod(1)
    area_P, other_area_P = ((box[:, 2:] - box[:, :2]).prod(1) for box in (box_P4, other_P4))
    return inter_P / (area_P + other_area_P - inter_P)


# Confusion matrix of classes and background
#
# The rules are YOLOv7's, with their quirks (golden `confusion.npz`): a found object is counted at [true, predicted],
# but a missed one at [background, true] and a false detection at [predicted, background]. False detections count only
# in images where an object was found, and images without any detection or without any label do not count at all.


class ConfusionMatrix:
    """Counts int64 [C + 1, C + 1], accumulated over batches, on the device of the batches."""

    def __init__(self, num_classes: int, *, conf_thres: float = 0.25, iou_thres: float = 0.45) -> None:
        self.num_classes = num_classes
        self.conf_thres = conf_thres
        self.iou_thres = iou_thres
        self._counts: Tensor | None = None

    def update(self, found: Detections, labels: Labels) -> None:
        """Count a batch; detections and labels must be in the same pixel coordinates."""
        cells = self._cells(found, labels)
        num_cells = (self.num_classes + 1) ** 2
        counts = torch.bincount(cells, minlength=num_cells)[:num_cells]
        self._counts = counts if self._counts is None else self._counts + counts

    def set_counts(self, counts: Sequence[np.ndarray]) -> None:
        """Set the counts to the sum of these, each as returned by `counts`."""
        self._counts = torch.from_numpy(np.sum(counts, axis=0)).flatten() if counts else None

    def counts(self) -> Tensor:
        """int64 [C + 1, C + 1] on the host; the last row and column are the background."""
        side = self.num_classes + 1
        return (
            torch.zeros((side, side), dtype=torch.int64)
            if self._counts is None
            else self._counts.cpu().view(side, side)
        )

    def _cells(self, found: Detections, labels: Labels) -> Tensor:
        """Positions in the flattened matrix to increment for a batch."""
        background, side = self.num_classes, self.num_classes + 1
        counted_B = _occurs(found.image_D, found.num_images) & _occurs(labels.image_L, found.num_images)
        confident_D = (found.score_D > self.conf_thres) & counted_B[found.image_D]
        partner_L = self._partners(found, labels, confident_D)
        matched_L = (partner_L < len(confident_D)).nonzero().flatten()
        partner_L = partner_L[matched_L]
        missed_L = counted_B[labels.image_L].index_fill_(0, matched_L, False)
        matched_B = torch.zeros_like(counted_B).index_fill_(0, labels.image_L[matched_L], True)
        false_D = (confident_D & matched_B[found.image_D]).index_fill_(0, partner_L, False)
        class_D = found.class_D
        return torch.cat(
            (
                labels.class_L[matched_L] * side + class_D[partner_L],
                background * side + labels.class_L[missed_L],
                class_D[false_D] * side + background,
            )
        )

    def _partners(self, found: Detections, labels: Labels, confident_D: Tensor) -> Tensor:
        """The detection matched to each label, or D: the best of those that do not overlap another label more."""
        number_S = confident_D.nonzero().flatten()
        confident_P, label_P = pairs_of_equal_key(found.image_D[number_S], labels.image_L)
        found_P = number_S[confident_P]
        iou_P = iou_of_pairs(found.box_D4[found_P], labels.box_L4[label_P])
        close = (iou_P > self.iou_thres).nonzero().flatten()
        iou_P, found_P, label_P = iou_P[close], found_P[close], label_P[close]
        _, label_D = best_partner(iou_P, found_P, label_P, len(confident_D), len(labels.image_L))
        own = (label_D[found_P] == label_P).nonzero().flatten()
        _, partner_L = best_partner(iou_P[own], label_P[own], found_P[own], len(labels.image_L), len(confident_D))
        return partner_L


def _occurs(image: Tensor, num_images: int) -> Tensor:
    return torch.zeros(num_images, dtype=torch.bool, device=image.device).index_fill_(0, image, True)
