"""Measures and conversions of YOLOv7's boxes and polygons that the goldens cover and the product does not use."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.augment.labels import RESAMPLED, _Edges
from flatout.yolo.boxes import EPSILON, cxcywh_to_xyxy
from flatout.yolo.data.letterbox import Fit, _with_bars


def paired_iou(box_cxcywh_N4: Tensor, true_cxcywh_N4: Tensor) -> Tensor:
    """Intersection over union of box n with true box n, [N]."""
    return _overlap(box_cxcywh_N4, true_cxcywh_N4).iou


def paired_giou(box_cxcywh_N4: Tensor, true_cxcywh_N4: Tensor) -> Tensor:
    """Generalised IoU: IoU minus the empty share of the enclosing box, [N]."""
    pair = _overlap(box_cxcywh_N4, true_cxcywh_N4)
    hull_N = pair.hull_w * pair.hull_h + EPSILON
    return pair.iou - (hull_N - pair.union) / hull_N


def paired_diou(box_cxcywh_N4: Tensor, true_cxcywh_N4: Tensor) -> Tensor:
    """Distance IoU: IoU minus the squared distance of the centres relative to the enclosing box's diagonal, [N]."""
    pair = _overlap(box_cxcywh_N4, true_cxcywh_N4)
    return pair.iou - pair.distance


class _Overlap(NamedTuple):
    """Terms of the paired measures, each [N]."""

    iou: Tensor
    union: Tensor
    w: Tensor
    h: Tensor
    """Sizes computed from the corners; heights include an epsilon, widths do not."""

    true_w: Tensor
    true_h: Tensor
    hull_w: Tensor
    hull_h: Tensor
    distance: Tensor
    """Squared distance of the centres, divided by the squared diagonal of the enclosing box."""


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
    centres = ((true_x1 + true_x2 - x1 - x2).square() + (true_y1 + true_y2 - y1 - y2).square()) / 4
    distance = centres / (hull_w.square() + hull_h.square() + EPSILON)
    return _Overlap(inter / union, union, w, h, true_w, true_h, hull_w, hull_h, distance)


def norm_to_input(box_cxcywh_norm: Tensor, *, size_wh: tuple[int, int], pad_xy: tuple[float, float] = (0, 0)) -> Tensor:
    """Convert relative centre and size to corners in pixels of an image of `size_wh`, offset by `pad_xy`; [..., 4]."""
    centre, size = box_cxcywh_norm.split(2, -1)
    scale, pad = (torch.tensor(pair, dtype=size.dtype, device=size.device) for pair in (size_wh, pad_xy))
    return torch.cat((scale * (centre - size / 2) + pad, scale * (centre + size / 2) + pad), -1)


def fit_stretched(native_hw: tuple[int, int], target_hw: tuple[int, int]) -> Fit:
    """Stretch an image to the target, without padding."""
    ratio_wh = target_hw[1] / native_hw[1], target_hw[0] / native_hw[0]
    return _with_bars((target_hw[1], target_hw[0]), ratio_wh, 0, 0)


def resample(polygon_P2: np.ndarray) -> np.ndarray:
    """1000 points along one closed polygon, float64 [1000, 2]."""
    edges = _Edges(polygon_P2, np.array([len(polygon_P2)]))
    along_X = np.arange(RESAMPLED) * (len(polygon_P2) / (RESAMPLED - 1))
    # The last point equals the first: it lies at the end of the last edge.
    edge_X = np.minimum(along_X.astype(np.int64), len(polygon_P2) - 1)
    return np.stack(tuple(edges.at(edge_X, along_X - edge_X)), 1)
