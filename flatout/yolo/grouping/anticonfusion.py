"""Classes that are mistaken for each other go to different heads, and heads get about equally many boxes.

A greedy colouring: the classes with the most boxes choose first.

Dimension key:  C classes   H heads
"""

from collections.abc import Sequence

import numpy as np

from flatout.yolo.grouping.groups import Grouping, check_heads, make_grouping

COCO_PAIRS = (
    ("car", "truck"), ("bicycle", "motorcycle"), ("cat", "dog"), ("sheep", "cow"), ("fork", "knife"),
    ("knife", "spoon"), ("fork", "spoon"), ("wine glass", "cup"), ("apple", "orange"), ("chair", "couch"),
    ("mouse", "remote"), ("cell phone", "remote"), ("microwave", "oven"), ("skis", "snowboard"),
    ("backpack", "handbag"), ("bus", "truck"), ("car", "bus"), ("couch", "bed"), ("horse", "cow"),
)  # fmt: skip
"""What detectors trained on COCO are known to mix up."""


def group_apart(num_boxes_C: np.ndarray, confused_CC: np.ndarray, heads: int) -> Grouping:
    """Heads numbered in the order in which they are first needed; `confused_CC` is symmetric and boolean.

    Each class goes to the head with the fewest boxes among those without a class it is confused with; if there is none,
    to the head with the fewest of all. Ties: the lower class, the lower head.
    """
    check_heads(heads, len(num_boxes_C))
    head_C = _coloured(num_boxes_C, confused_CC, heads)
    boxes_H = np.bincount(head_C, num_boxes_C, heads).astype(np.int64)
    shares_H = 100 * boxes_H / max(1, boxes_H.sum())
    comments = [f"{boxes} boxes ({share:.1f} %)" for boxes, share in zip(boxes_H, shares_H, strict=True)]
    groups = [np.flatnonzero(head_C == head).tolist() for head in range(heads)]
    return make_grouping("anticonfusion", groups, [f"Head {head}" for head in range(heads)], comments)


def _coloured(num_boxes_C: np.ndarray, confused_CC: np.ndarray, heads: int) -> np.ndarray:
    """Head of each class, int64 [C]; none is empty."""
    head_C = np.full(len(num_boxes_C), -1)
    boxes_H = np.zeros(heads, np.int64)
    order_C = np.argsort(-num_boxes_C, kind="stable")
    for place, number in enumerate(order_C.tolist()):
        free_H = np.ones(heads, bool)
        free_H[head_C[confused_CC[number] & (head_C >= 0)]] = False
        empty_H = np.bincount(head_C[head_C >= 0], minlength=heads) == 0
        # Classes without boxes would all go to one head; no head may stay without a class.
        if empty_H.sum() == len(order_C) - place:
            free_H = empty_H
        allowed = np.flatnonzero(free_H) if free_H.any() else np.arange(heads)
        head = int(allowed[boxes_H[allowed].argmin()])
        head_C[number] = head
        boxes_H[head] += num_boxes_C[number]
    return head_C


def known_pairs(names: Sequence[str]) -> np.ndarray:
    """Which classes are known to be mixed up, by their names in COCO; bool [C, C], symmetric."""
    number = {name.strip().lower(): place for place, name in enumerate(names)}
    confused_CC = np.zeros((len(names), len(names)), bool)
    for one, other in COCO_PAIRS:
        if one in number and other in number:
            confused_CC[number[one], number[other]] = confused_CC[number[other], number[one]] = True
    return confused_CC


def confused_pairs(share_CC: np.ndarray, *, least: float) -> np.ndarray:
    """Pairs of which at least this share is taken for the other, either way round; bool [C, C], symmetric.

    `share_CC` has the predicted class as its row and shares of the true class in its columns.
    """
    confused_CC: np.ndarray = np.maximum(share_CC, share_CC.T) >= least
    np.fill_diagonal(confused_CC, False)
    return confused_CC


def kept_together(confused_CC: np.ndarray, grouping: Grouping) -> int:
    """How many confused pairs share a head after all."""
    head_C = np.array(grouping.config.head_C)
    return int((confused_CC & (head_C[:, None] == head_C)).sum()) // 2
