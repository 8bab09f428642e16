"""Reference implementation of non-maximum suppression, one image at a time, with ordinary kernels."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.boxes import cxcywh_to_xyxy
from flatout.yolo.nms import NmsConfig

Suppress = Callable[[Tensor, Tensor, float, int], Tensor]
"""(box [n, 4], score [n], threshold, limit) -> kept rows, best first."""


def best_suppress() -> tuple[str, Suppress]:
    """The name and function of torchvision's kernel if it is installed, else of a loop over the kept boxes."""
    try:
        from torchvision.ops import nms
    except ImportError:
        return "NumPy loop", greedy
    return "torchvision", lambda box, score, threshold, limit: nms(box, score, threshold)[:limit]


def greedy(box: Tensor, score: Tensor, threshold: float, limit: int) -> Tensor:
    """Keep the best box, drop those that overlap it too much, repeat; float32, stable, up to `limit` boxes."""
    rest = torch.sort(score, descending=True, stable=True).indices
    left, top, right, bottom = columns = box[rest].cpu().numpy().T.copy()
    table = np.vstack((*columns, (right - left) * (bottom - top)))
    number = rest.cpu().numpy()
    kept: list[int] = []
    while len(number) and len(kept) < limit:
        kept.append(int(number[0]))
        left, top, right, bottom, area = table[:, 0]
        width = np.minimum(right, table[2]) - np.maximum(left, table[0])
        height = np.minimum(bottom, table[3]) - np.maximum(top, table[1])
        with np.errstate(invalid="ignore"):
            inter = np.maximum(width, 0) * np.maximum(height, 0)
            stays = ~((inter / (area + table[4] - inter)).astype(np.float64) > threshold)
        stays[0] = False
        table, number = table[:, stays], number[stays]
    return torch.tensor(kept, dtype=torch.int64, device=box.device)


def plain_nms(
    prediction_BNO: Tensor,
    config: NmsConfig,
    labels: Sequence[Tensor] | None = None,
    suppress: Suppress = greedy,
) -> list[Tensor]:
    """Detections of each image, [n, 6]: x1, y1, x2, y2, score, class."""
    labels = labels or [prediction_BNO.new_zeros((0, 5))] * len(prediction_BNO)
    return [_one_image(row, config, label, suppress) for row, label in zip(prediction_BNO, labels, strict=True)]


def _one_image(row: Tensor, config: NmsConfig, label: Tensor, suppress: Suppress) -> Tensor:
    row = row[row[:, 4] > config.conf_thres]
    if len(label):
        certain = row.new_zeros((len(label), row.shape[1]))
        certain[:, :4], certain[:, 4] = label[:, 1:], 1
        certain[range(len(label)), 5 + label[:, 0].long()] = 1
        row = torch.cat((row, certain))
    score = row[:, 4:5] if row.shape[1] == 6 else row[:, 5:] * row[:, 4:5]
    box = cxcywh_to_xyxy(row[:, :4])
    if config.multi_label:
        number, class_id = (score > config.conf_thres).nonzero(as_tuple=True)
        found = torch.cat((box[number], score[number, class_id, None], class_id[:, None]), 1).float()
    else:
        top, class_id = score.max(1, keepdim=True)
        found = torch.cat((box, top, class_id), 1).float()[top[:, 0] > config.conf_thres]
    if config.classes is not None:
        found = found[torch.isin(found[:, 5].long(), torch.tensor(config.classes, device=found.device))]
    if len(found) > config.max_nms:
        found = found[torch.sort(found[:, 4], descending=True, stable=True).indices[: config.max_nms]]
    shift = found[:, 5:] * (0 if config.agnostic else 4096)
    return found[suppress(found[:, :4] + shift, found[:, 4], config.iou_thres, config.max_det)]
