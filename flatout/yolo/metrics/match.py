"""Which detections are right: each label is found at most once, by the first detection that means it.

A detection means the label of its image and class that it overlaps most, whether that label is still free or not; so
no detection has to wait for another, and a batch is matched at once, on the device where it is.

Dimension key:  B images   D detections, by descending score in each image   L labels   K thresholds   T rows
                P pairs of a detection and a label
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.boxes import cxcywh_to_xyxy
from flatout.yolo.letterbox import Letterbox, to_native
from flatout.yolo.nms.detections import Detections
from flatout.yolo.ragged import first_per_list, max_per_list, pairs_of_equal_key

IOU_THRESHOLDS = tuple(torch.linspace(0.5, 0.95, 10).tolist())
"""Ten float32 numbers; overlap must be greater."""


class Labels(NamedTuple):
    """True boxes of a batch, on one device."""

    box_L4: Tensor
    """float32 corners in picture pixels."""

    class_L: Tensor
    image_L: Tensor


def labels_in_pictures(target_T6: Tensor, letterbox: Letterbox, input_hw: tuple[int, int]) -> Labels:
    """From the loader's rows (image, class, cx, cy, w, h normalised to the input); a negative image is padding."""
    target_L6 = target_T6[target_T6[:, 0] >= 0].float()
    height, width = input_hw
    scale = torch.tensor([width, height, width, height], dtype=torch.float32, device=target_L6.device)
    image_L = target_L6[:, 0].long()
    box_L4 = to_native(cxcywh_to_xyxy(target_L6[:, 2:] * scale), image_L, letterbox)
    return Labels(box_L4, target_L6[:, 1].long(), image_L)


def match_to_labels(found: Detections, labels: Labels) -> Tensor:
    """Right or wrong at each of IOU_THRESHOLDS, bool [D, K]; detections and labels in the same pixels."""
    num_found, num_labels = len(found.image_D), len(labels.image_L)
    class_D = found.class_D
    if not num_found or not num_labels:
        return torch.zeros((num_found, len(IOU_THRESHOLDS)), dtype=torch.bool, device=class_D.device)
    # Larger than any class, so that an image and a class give a number of their own.
    stride = torch.maximum(class_D.max(), labels.class_L.max()) + 1
    found_P, label_P = pairs_of_equal_key(found.image_D * stride + class_D, labels.image_L * stride + labels.class_L)
    iou_P = iou_of_pairs(found.box_D4.index_select(0, found_P), labels.box_L4.index_select(0, label_P))
    best_D, meant_D = best_partner(iou_P, found_P, label_P, num_found, num_labels)
    hit_D = (best_D > IOU_THRESHOLDS[0]).nonzero().flatten()
    first_L = first_per_list(hit_D, meant_D[hit_D], num_labels, absent=num_found)
    right_D = torch.zeros(num_found + 1, dtype=torch.bool, device=best_D.device).index_fill_(0, first_L, True)[:-1]
    thresholds_K = torch.tensor(IOU_THRESHOLDS, device=best_D.device)
    return right_D[:, None] & (best_D[:, None] > thresholds_K)


def best_partner(
    iou_P: Tensor, one_P: Tensor, other_P: Tensor, num_ones: int, num_others: int
) -> tuple[Tensor, Tensor]:
    """For every one, its largest overlap and the other it has that with (the first of equals; num_others: none)."""
    best = max_per_list(iou_P, one_P, num_ones)
    is_best = (iou_P == best.index_select(0, one_P)).nonzero().flatten()
    return best, first_per_list(other_P[is_best], one_P[is_best], num_ones, absent=num_others)


def iou_of_pairs(box_P4: Tensor, other_P4: Tensor) -> Tensor:
    """Intersection over union of P pairs of boxes given by corners, [P]; no epsilon."""
    low_P2, high_P2 = torch.maximum(box_P4[:, :2], other_P4[:, :2]), torch.minimum(box_P4[:, 2:], other_P4[:, 2:])
    inter_P = (high_P2 - low_P2).clamp_(min=0).prod(1)
    area_P, other_area_P = ((box[:, 2:] - box[:, :2]).prod(1) for box in (box_P4, other_P4))
    return inter_P / (area_P + other_area_P - inter_P)
