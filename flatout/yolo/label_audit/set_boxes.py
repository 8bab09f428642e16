"""Boxes of a whole image set: the labels, the detections of one pass, and detections fused from several passes.

Pure NumPy. Corners are relative to the image, so that passes at different sizes can be compared.

Dimension key:  N images   D boxes of all images   n m boxes of one image   P pairs of them   k fused boxes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flatout.yolo.data.image_set import Labels, offsets

FUSE_IOU = 0.55
"""Detections of two passes that overlap by this much, of the same class, are the same object."""
PAIRS_AT_ONCE = 1 << 20
"""Most pairs of boxes that are compared at a time: large images, looked at in tiles, have thousands of detections."""
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class SetBoxes:
    """Boxes of all images, concatenated."""

    first_N: np.ndarray
    """int64 [N + 1]: image i has the boxes first_N[i] up to, but not including, first_N[i + 1]."""
    box_D4: np.ndarray
    """float32: x1, y1, x2, y2 relative to the image."""
    class_D: np.ndarray
    """int64."""
    score_D: np.ndarray
    """float32: confidence; 1 for labels."""

    @property
    def num_images(self) -> int:
        return len(self.first_N) - 1

    def rows(self, image: int) -> slice:
        return slice(int(self.first_N[image]), int(self.first_N[image + 1]))

    @property
    def image_D(self) -> np.ndarray:
        """The image of each box, int64."""
        return np.repeat(np.arange(self.num_images), np.diff(self.first_N))


def labels_as_boxes(labels: Labels) -> SetBoxes:
    """The labels of an image set, in their order."""
    centre_T2, half_T2 = labels.class_box_T5[:, 1:3], labels.class_box_T5[:, 3:5] / 2
    box_T4 = np.concatenate((centre_T2 - half_T2, centre_T2 + half_T2), 1)
    class_T = labels.class_box_T5[:, 0].astype(np.int64)
    return SetBoxes(labels.first_N, box_T4, class_T, np.ones(len(class_T), np.float32))


def boxes_by_image(image_D: np.ndarray, row_D6: np.ndarray, num_images: int) -> SetBoxes:
    """Boxes from rows x1, y1, x2, y2, score, class, sorted by image; within an image the order is kept.

    `image_D`: number of the image of each row, in any order; corners are relative to the image, 0 to 1.
    """
    order_D = np.argsort(image_D, kind="stable")
    counts_N = np.bincount(image_D, minlength=num_images)
    row_D6 = row_D6[order_D]
    return SetBoxes(
        offsets(counts_N),
        row_D6[:, :4].astype(np.float32),
        row_D6[:, 5].astype(np.int64),
        row_D6[:, 4].astype(np.float32),
    )


def pairwise_iou(box_n4: np.ndarray, box_m4: np.ndarray) -> np.ndarray:
    """IoU of every box with every other, [n, m]; 0 where both are empty."""
    low = np.maximum(box_n4[:, None, :2], box_m4[None, :, :2])
    high = np.minimum(box_n4[:, None, 2:], box_m4[None, :, 2:])
    shared_nm = np.clip(high - low, 0, None).prod(2)
    union_nm = area(box_n4)[:, None] + area(box_m4)[None] - shared_nm
    return np.asarray(shared_nm / np.maximum(union_nm, 1e-12))


class Overlaps(NamedTuple):
    """All pairs of boxes that overlap, sorted by `n_P`, then by `m_P`."""

    n_P: np.ndarray
    """int64: the box of the first set; likewise m_P of the second."""
    m_P: np.ndarray
    iou_P: np.ndarray


def overlaps(box_n4: np.ndarray, box_m4: np.ndarray) -> Overlaps:
    """The entries above 0 of `pairwise_iou`, without all of it in memory.

    Boxes are taken from left to right, some at a time, and compared with those that begin before the last of them ends,
    and end after the first of them begins.
    """
    num_rows = min(ROWS_AT_ONCE, max(1, PAIRS_AT_ONCE // max(1, len(box_m4))))
    order_n = np.argsort(box_n4[:, 0], kind="stable")
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))]
    for first in range(0, len(box_n4), num_rows):
        own = order_n[first : first + num_rows]
        left, right = box_n4[own, 0].min(), box_n4[own, 2].max()
        near = np.flatnonzero((box_m4[:, 0] < right) & (box_m4[:, 2] > left))
        iou_nm = pairwise_iou(box_n4[own], box_m4[near])
        n_P, m_P = np.nonzero(iou_nm)
        found.append((own[n_P], near[m_P], iou_nm[n_P, m_P]))
    n_P, m_P, iou_P = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order_P = np.lexsort((m_P, n_P))
    return Overlaps(n_P[order_P], m_P[order_P], iou_P[order_P])


def area(box_n4: np.ndarray) -> np.ndarray:
    return np.asarray(np.clip(box_n4[:, 2:] - box_n4[:, :2], 0, None).prod(1))


def fuse(passes: Sequence[SetBoxes]) -> SetBoxes:
    """One set of detections from several passes over the same images.

    Boxes of a class that overlap are one detection: its box is their mean, weighted by score, and its score is the mean
    over all passes of the best score there, 0 for a pass that did not find it. So a detection that only one of four
    passes made counts a quarter.
    """
    if len(passes) == 1:
        return passes[0]
    fused = []
    for image in range(passes[0].num_images):
        own = [each.rows(image) for each in passes]
        box_n4 = np.concatenate([each.box_D4[rows] for each, rows in zip(passes, own, strict=True)])
        class_n = np.concatenate([each.class_D[rows] for each, rows in zip(passes, own, strict=True)])
        score_n = np.concatenate([each.score_D[rows] for each, rows in zip(passes, own, strict=True)])
        pass_n = np.repeat(np.arange(len(passes)), [rows.stop - rows.start for rows in own])
        fused.append(_fuse_image(box_n4, class_n, score_n, pass_n, len(passes)))
    image_D = np.repeat(np.arange(len(fused)), [len(row_k6) for row_k6 in fused])
    return boxes_by_image(image_D, np.concatenate(fused), len(fused))


def _fuse_image(
    box_n4: np.ndarray, class_n: np.ndarray, score_n: np.ndarray, pass_n: np.ndarray, num_passes: int
) -> np.ndarray:
    """Rows x1, y1, x2, y2, score, class, float32 [k, 6]."""
    order_n = np.argsort(-score_n, kind="stable")
    box_n4, class_n, score_n, pass_n = box_n4[order_n], class_n[order_n], score_n[order_n], pass_n[order_n]
    n_P, m_P, iou_P = overlaps(box_n4, box_n4)
    is_same_P = (iou_P >= FUSE_IOU) & (class_n[n_P] == class_n[m_P])
    n_P, m_P = n_P[is_same_P], m_P[is_same_P]
    first_n = np.searchsorted(n_P, np.arange(len(box_n4) + 1))
    left_n = np.ones(len(box_n4), bool)
    rows = []
    for seed in range(len(box_n4)):
        if not left_n[seed]:
            continue
        same = m_P[first_n[seed] : first_n[seed + 1]]
        members = np.union1d(same[left_n[same]], [seed])  # an empty box has no IoU, not even with itself
        # The best of each pass: rows are sorted by score, and `unique` returns the first of each value.
        members = members[np.unique(pass_n[members], return_index=True)[1]]
        left_n[members] = False
        weight = score_n[members]
        box_4 = (box_n4[members] * weight[:, None]).sum(0) / weight.sum()
        rows.append([*box_4.tolist(), weight.sum() / num_passes, class_n[seed]])
    return np.array(rows, np.float32).reshape(-1, 6)
