"""Evaluation while the detector runs: every batch is matched as it comes, and summed up once at the end.

    detections + targets of a batch -> to picture pixels -> matched on the device -> a few bytes per detection
    ... -> result(): one copy to the host, AP per class

Dimension key:  D detections   L labels   K overlap thresholds   T target rows
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.errors import DataError
from flatout.yolo.boxes import Letterbox, to_native
from flatout.yolo.metrics.average_precision import score_classes
from flatout.yolo.metrics.evaluation import Evaluation, mean_scores
from flatout.yolo.metrics.match import IOU_THRESHOLDS, ConfusionMatrix, labels_in_pictures, match_to_labels
from flatout.yolo.nms.detections import Detections


class Matches(NamedTuple):
    """What AP needs to know, in the order of the batches."""

    right_DK: Tensor
    score_D: Tensor
    class_D: Tensor
    label_class_L: Tensor


class Evaluator:
    """Takes batches, gives an `Evaluation`. Keeps about 20 bytes per detection on the device until then."""

    def __init__(self, num_classes: int, *, confusion: bool = False, v5_metric: bool = False) -> None:
        """`confusion` also counts what is taken for what; `v5_metric` lets recall curves end at 1."""
        self.num_classes = num_classes
        self.confusion = ConfusionMatrix(num_classes) if confusion else None
        self._v5_metric = v5_metric
        self.batches: list[Matches] = []
        """In the order they came. Several ranks put theirs together here (evaluate/run.py)."""
        self.num_images = 0

    @torch.no_grad()
    def update(
        self, found: Detections, target_T6: Tensor, letterbox: Letterbox, input_hw: tuple[int, int]
    ) -> Detections:
        """Match a batch; returns its detections in picture pixels, clipped (for a COCO file or drawings).

        `found` is in input pixels, `target_T6` holds image, class, cx, cy, w, h normalised to the input (a negative
        image marks padding); everything on one device.
        """
        box_D4 = to_native(found.box_D4, found.image_D, letterbox)
        found = found._replace(row_D6=torch.cat((box_D4, found.row_D6[:, 4:]), dim=1))
        labels = labels_in_pictures(target_T6, letterbox, input_hw)
        right_DK = match_to_labels(found, labels)
        self.batches.append(Matches(right_DK, found.score_D, found.class_D, labels.class_L))
        self.num_images += found.num_images
        if self.confusion is not None:
            self.confusion.update(found, labels)
        return found

    def matches(self) -> Matches:
        """All batches so far, on the host. The host waits for the device, once."""
        if not self.batches:
            nothing = torch.zeros(0)
            return Matches(torch.zeros(0, len(IOU_THRESHOLDS)).bool(), nothing, nothing.long(), nothing.long())
        return Matches(*(torch.cat(column).cpu() for column in zip(*self.batches, strict=True)))

    def result(self) -> Evaluation:
        """Sum up all batches so far; more may follow."""
        matches = self.matches()
        label_class_L = matches.label_class_L.numpy()
        self._check(label_class_L)
        # YOLOv7 reports nothing at all where nothing is right at any threshold.
        any_right = bool(matches.right_DK.any())
        classes = score_classes(
            matches.right_DK.numpy(),
            matches.score_D.numpy(),
            matches.class_D.numpy(),
            label_class_L if any_right else label_class_L[:0],
            v5_metric=self._v5_metric,
        )
        return Evaluation(
            num_images=self.num_images,
            num_labels=len(label_class_L),
            num_classes=self.num_classes,
            scores=mean_scores(classes),
            classes=classes,
            confusion=None if self.confusion is None else self.confusion.counts().numpy(),
        )

    def _check(self, label_class_L: np.ndarray) -> None:
        if len(label_class_L) and not 0 <= label_class_L.min() <= label_class_L.max() < self.num_classes:
            bad = [number for number in np.unique(label_class_L).tolist() if not 0 <= number < self.num_classes]
            raise DataError(
                f"Labels have classes {bad}, but the detector knows {self.num_classes} (0..{self.num_classes - 1}). "
                "Check nc in the data file."
            )
