"""Box formats and the IoU family: pure tensor functions, any device, any float dtype.

Dimension key:  N, M boxes; the last axis (4) is named in the function: xyxy corners or cxcywh centre and size.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-7
"""Keeps the paired measures finite for empty boxes; part of YOLOv7's numbers, like the places where it is added."""


def cxcywh_to_xyxy(box_cxcywh: Tensor) -> Tensor:
    """Centre and size to corners, [..., 4]."""
    centre, size = box_cxcywh.split(2, -1)
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def xyxy_to_cxcywh(box_xyxy: Tensor) -> Tensor:
    """Corners to centre and size, [..., 4]."""
    low, high = box_xyxy.split(2, -1)
    return torch.cat(((low + high) / 2, high - low), -1)


def pairwise_iou(box_xyxy_N4: Tensor, box_xyxy_M4: Tensor) -> Tensor:
    """Intersection over union of every pair, [N, M]; no epsilon: two empty boxes give nan."""
    low_NM2 = torch.maximum(box_xyxy_N4[:, None, :2], box_xyxy_M4[None, :, :2])
    high_NM2 = torch.minimum(box_xyxy_N4[:, None, 2:], box_xyxy_M4[None, :, 2:])
    inter_NM = (high_NM2 - low_NM2).clamp(min=0).prod(2)
    area_N, area_M = ((box[:, 2:] - box[:, :2]).prod(1) for box in (box_xyxy_N4, box_xyxy_M4))
    return inter_NM / (area_N[:, None] + area_M[None, :] - inter_NM)


def paired_iou(box_cxcywh_N4: Tensor, true_cxcywh_N4: Tensor) -> Tensor:
    """Intersection over union of box n with true box n, [N]."""
    return _overlap(box_cxcywh_N4, true_cxcywh_N4).iou


def paired_giou(box_cxcywh_N4: Tensor, true_cxcywh_N4: Tensor) -> Tensor:
    """IoU less the empty share of the enclosing box, [N]."""
    pair = _overlap(box_cxcywh_N4, true_cxcywh_N4)
    hull_N = pair.hull_w * pair.hull_h + EPSILON
    return pair.iou - (hull_N - pair.union) / hull_N


def paired_diou(box_cxcywh_N4: Tensor, true_cxcywh_N4: Tensor) -> Tensor:
    """IoU less the distance of the centres relative to the enclosing box's diagonal, [N]."""
    pair = _overlap(box_cxcywh_N4, true_cxcywh_N4)
    return pair.iou - pair.distance


def paired_ciou(box_cxcywh_N4: Tensor, true_cxcywh_N4: Tensor) -> Tensor:
    """DIoU less a penalty for another aspect ratio, [N]; the penalty's weight is a constant in the backward pass."""
    pair = _overlap(box_cxcywh_N4, true_cxcywh_N4)
    angle_N = torch.atan(pair.true_w / (pair.true_h + EPSILON)) - torch.atan(pair.w / (pair.h + EPSILON))
    aspect_N = 4 / math.pi**2 * angle_N.square()
    with torch.no_grad():
        weight_N = aspect_N / (aspect_N - pair.iou + (1 + EPSILON))
    return pair.iou - (pair.distance + aspect_N * weight_N)


class _Overlap(NamedTuple):
    """What the paired measures are made of, each [N]."""

    iou: Tensor
    union: Tensor
    w: Tensor
    h: Tensor
    """Sizes are taken from the corners; heights carry an epsilon, widths do not."""

    true_w: Tensor
    true_h: Tensor
    hull_w: Tensor
    hull_h: Tensor
    distance: Tensor
    """Squared distance of the centres over the squared diagonal of the enclosing box."""


def _overlap(box_cxcywh_N4: Tensor, true_cxcywh_N4: Tensor) -> _Overlap:
    x1, y1, x2, y2 = cxcywh_to_xyxy(box_cxcywh_N4).unbind(1)
    true_x1, true_y1, true_x2, true_y2 = cxcywh_to_xyxy(true_cxcywh_N4).unbind(1)
    common_w = (torch.minimum(x2, true_x2) - torch.maximum(x1, true_x1)).clamp(min=0)
    common_h = (torch.minimum(y2, true_y2) - torch.maximum(y1, true_y1)).clamp(min=0)
    inter = common_w * common_h
    w, h = x2 - x1, y2 - y1 + EPSILON
    true_w, true_h = true_x2 - true_x1, true_y2 - true_y1 + EPSILON
    union = w * h + true_w * true_h - inter + EPSILON
    hull_w = torch.maximum(x2, true_x2) - torch.minimum(x1, true_x1)
    hull_h = torch.maximum(y2, true_y2) - torch.minimum(y1, true_y1)
    way = ((true_x1 + true_x2 - x1 - x2).square() + (true_y1 + true_y2 - y1 - y2).square()) / 4
    distance = way / (hull_w.square() + hull_h.square() + EPSILON)
    return _Overlap(inter / union, union, w, h, true_w, true_h, hull_w, hull_h, distance)
