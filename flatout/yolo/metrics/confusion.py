"""What is taken for what: a confusion matrix over classes and background.

The rules are YOLOv7's, with their quirks (golden `confusion.npz`): a found object is counted at [true, predicted], but
a missed one at [background, true] and a false one at [predicted, background]; false ones count only in images where
something was found, and images without any detection or without any label do not count at all.

Dimension key:  B images   C classes   D detections   L labels   P pairs of a detection and a label of its image
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.metrics.match import Labels, best_partner, iou_of_pairs
from flatout.yolo.nms.detections import Detections
from flatout.yolo.ragged import pairs_of_equal_key


class ConfusionMatrix:
    """Counts int64 [C + 1, C + 1] that grow with every batch, on the device where the batches are."""

    def __init__(self, num_classes: int, *, conf_thres: float = 0.25, iou_thres: float = 0.45) -> None:
        self.num_classes = num_classes
        self.conf_thres = conf_thres
        self.iou_thres = iou_thres
        self._counts: Tensor | None = None

    def update(self, found: Detections, labels: Labels) -> None:
        """Count a batch; detections and labels in the same pixels."""
        cells = self._cells(found, labels)
        num_cells = (self.num_classes + 1) ** 2
        counts = torch.bincount(cells, minlength=num_cells)[:num_cells]
        self._counts = counts if self._counts is None else self._counts + counts

    def hold(self, counts: Sequence[np.ndarray]) -> None:
        """From here on the sum of these, each as `counts` gives it."""
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
        """Place in the flattened matrix of everything that counts in this batch."""
        background, side = self.num_classes, self.num_classes + 1
        seen_B = _occurs(found.image_D, found.num_images) & _occurs(labels.image_L, found.num_images)
        sure_D = (found.score_D > self.conf_thres) & seen_B[found.image_D]
        partner_L = self._partners(found, labels, sure_D)
        matched_L = (partner_L < len(sure_D)).nonzero().flatten()
        partner_L = partner_L[matched_L]
        missed_L = seen_B[labels.image_L].index_fill_(0, matched_L, False)
        matched_B = torch.zeros_like(seen_B).index_fill_(0, labels.image_L[matched_L], True)
        false_D = (sure_D & matched_B[found.image_D]).index_fill_(0, partner_L, False)
        class_D = found.class_D
        return torch.cat(
            (
                labels.class_L[matched_L] * side + class_D[partner_L],
                background * side + labels.class_L[missed_L],
                class_D[false_D] * side + background,
            )
        )

    def _partners(self, found: Detections, labels: Labels, sure_D: Tensor) -> Tensor:
        """The detection that found each label, or D: the best of those that overlap no other label more."""
        number_S = sure_D.nonzero().flatten()
        sure_P, label_P = pairs_of_equal_key(found.image_D[number_S], labels.image_L)
        found_P = number_S[sure_P]
        iou_P = iou_of_pairs(found.box_D4[found_P], labels.box_L4[label_P])
        close = (iou_P > self.iou_thres).nonzero().flatten()
        iou_P, found_P, label_P = iou_P[close], found_P[close], label_P[close]
        _, meant_D = best_partner(iou_P, found_P, label_P, len(sure_D), len(labels.image_L))
        own = (meant_D[found_P] == label_P).nonzero().flatten()
        _, partner_L = best_partner(iou_P[own], label_P[own], found_P[own], len(labels.image_L), len(sure_D))
        return partner_L


def _occurs(image: Tensor, num_images: int) -> Tensor:
    return torch.zeros(num_images, dtype=torch.bool, device=image.device).index_fill_(0, image, True)
