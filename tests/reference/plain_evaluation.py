"""Reference implementations of matching, confusion and scores: literal loops, and ordinary fast code.

Dimension key:  n detections, by descending score, and m labels of one image   K thresholds   X points of a curve
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.boxes import pairwise_iou
from flatout.yolo.metrics import average_precision


def matched_by_loops(found_n6: Tensor, label_m5: Tensor, thresholds_K: Sequence[float]) -> np.ndarray:
    """Whether each detection is correct at each threshold, bool [n, K]; labels are class, x1, y1, x2, y2."""
    correct_nK = np.zeros((len(found_n6), len(thresholds_K)), bool)
    taken: set[int] = set()
    for number, row in enumerate(found_n6):
        own = [k for k, label in enumerate(label_m5) if int(label[0]) == int(row[5])]
        if own:
            iou = pairwise_iou(row[None, :4], label_m5[own, 1:])[0]
            best = own[int(iou.argmax())]
            if iou.max() > 0.5 and best not in taken:
                taken.add(best)
                correct_nK[number] = [bool(iou.max() > threshold) for threshold in thresholds_K]
    return correct_nK


def matched_per_image(found_n6: Tensor, label_m5: Tensor, thresholds_K: Tensor) -> Tensor:
    """`matched_by_loops` with one table of overlaps per image, on the device of the detections."""
    correct_nK = torch.zeros((len(found_n6), len(thresholds_K)), dtype=torch.bool, device=found_n6.device)
    if not len(found_n6) or not len(label_m5):
        return correct_nK
    iou_mn = pairwise_iou(label_m5[:, 1:], found_n6[:, :4]) * (label_m5[:, :1] == found_n6[:, 5])
    best_n, label_n = iou_mn.max(0)
    hit = (best_n > 0.5).nonzero().flatten()
    first = torch.from_numpy(np.unique(label_n[hit].cpu().numpy(), return_index=True)[1]).to(hit.device)
    correct_nK[hit[first]] = best_n[hit[first], None] > thresholds_K
    return correct_nK


def confused_by_loops(found_n6: Tensor, label_m5: Tensor, num_classes: int) -> np.ndarray:
    """Counts of one image, int64 [num_classes + 1, num_classes + 1]."""
    counts = np.zeros((num_classes + 1, num_classes + 1), np.int64)
    if not len(found_n6) or not len(label_m5):
        return counts
    confident_n6 = found_n6[found_n6[:, 4] > 0.25]
    iou_mn = pairwise_iou(label_m5[:, 1:], confident_n6[:, :4])
    pairs = [
        (float(iou_mn[m, n]), m, n)
        for m in range(len(label_m5))
        for n in range(len(confident_n6))
        if iou_mn[m, n] > 0.45
    ]
    best_label = {n: max((iou, -m) for iou, m, other in pairs if other == n) for _, _, n in pairs}
    partner: dict[int, tuple[float, int]] = {}
    for n, (iou, minus_m) in sorted(best_label.items()):
        if iou > partner.get(-minus_m, (0.0, 0))[0]:
            partner[-minus_m] = (iou, n)
    for m, label in enumerate(label_m5[:, 0].long().tolist()):
        if m in partner:
            counts[label, int(confident_n6[partner[m][1], 5])] += 1
        else:
            counts[num_classes, label] += 1
    found = {n for _, n in partner.values()}
    for n, class_id in enumerate(confident_n6[:, 5].long().tolist()):
        if partner and n not in found:
            counts[class_id, num_classes] += 1
    return counts


class PlainScores(NamedTuple):
    """Scores of one class from every point of its curves."""

    ap_K: list[float]
    full_recall_K: np.ndarray
    precision_X: np.ndarray
    recall_X: np.ndarray
    """Both at 1000 confidences from 0 to 1, at the first threshold."""


def scores_by_loops(correct_nK: np.ndarray, score_n: np.ndarray, num_labels: int) -> PlainScores:
    """Scores of one class with n detections in any order; of equal scores the first is the better one."""
    order_n = np.argsort(-score_n, kind="stable")
    true_nK, score_n = correct_nK[order_n].cumsum(0), score_n[order_n].astype(np.float64)
    number_n = np.arange(1, len(score_n) + 1)
    ap_K = [average_precision(true_n / (num_labels + 1e-16), true_n / number_n) for true_n in true_nK.T]
    point_X = np.linspace(0, 1, 1000)
    precision_X = np.interp(-point_X, -score_n, true_nK[:, 0] / number_n, left=1)
    recall_X = np.interp(-point_X, -score_n, true_nK[:, 0] / num_labels, left=0)
    return PlainScores(ap_K, true_nK[-1] / num_labels, precision_X, recall_X)


def to_image_by_hand(box_n4: np.ndarray, shape_6: Sequence[float]) -> np.ndarray:
    """Corners in the original image, clipped, from corners in the input; `shape_6` is h0, w0, ratio h, ratio w, pad x,
    pad y."""
    native_h, native_w, gain, _, pad_x, pad_y = shape_6
    moved = (box_n4 - np.array([pad_x, pad_y] * 2, np.float32)) / np.float32(gain)
    return np.clip(moved, 0, np.array([native_w, native_h] * 2, np.float32))
