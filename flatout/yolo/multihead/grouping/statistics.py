"""What grouping looks at: how often a class occurs, how its boxes are shaped, which classes meet in a picture.

Dimension key:  T boxes   C classes   S pictures of one slice
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.multihead.head_config import HeadConfig, HeadGroup

LEAST_SIDE_PX = 1.0
"""Boxes must be larger than this both ways for their shape to count."""
SLICE_PICTURES = 4096


@dataclass(frozen=True)
class BoxTable:
    """All boxes of a data set, one row each, in any order."""

    picture_T: np.ndarray
    """int64: equal numbers are the same picture."""
    class_T: np.ndarray
    """int64."""
    size_wh_px_T2: np.ndarray
    """float64, in pixels of the picture."""


@dataclass(frozen=True)
class ClassStatistics:
    """A data set seen class by class."""

    num_boxes_C: np.ndarray
    """int64; boxes of every size."""
    log_ratio_C: np.ndarray
    """float64: mean of ln(width / height); 0 for a class without boxes."""
    together_CC: np.ndarray
    """int64: pictures that hold both classes; on the diagonal, pictures that hold the class."""

    @property
    def num_classes(self) -> int:
        return len(self.num_boxes_C)


def statistics_of(boxes: BoxTable, num_classes: int) -> ClassStatistics:
    """Of boxes whose classes are 0 to num_classes - 1."""
    return ClassStatistics(
        np.bincount(boxes.class_T, minlength=num_classes),
        mean_log_ratio(boxes.class_T, boxes.size_wh_px_T2, num_classes),
        pictures_together(boxes.picture_T, boxes.class_T, num_classes),
    )


def mean_log_ratio(class_T: np.ndarray, size_wh_px_T2: np.ndarray, num_classes: int) -> np.ndarray:
    """Mean of ln(width / height) per class, float64 [C]."""
    large_T = (size_wh_px_T2 > LEAST_SIDE_PX).all(1)
    width_T, height_T = size_wh_px_T2[large_T].T
    sum_C = np.bincount(class_T[large_T], np.log(width_T / height_T), num_classes)
    count_C = np.bincount(class_T[large_T], minlength=num_classes)
    mean_C: np.ndarray = sum_C / np.maximum(count_C, 1)
    return mean_C


def pictures_together(picture_T: np.ndarray, class_T: np.ndarray, num_classes: int) -> np.ndarray:
    """How many pictures hold both of two classes, int64 [C, C]; a picture counts a class once."""
    together_CC = np.zeros((num_classes, num_classes))
    row_T = np.unique(picture_T, return_inverse=True)[1].ravel()
    order_T = np.argsort(row_T, kind="stable")
    row_T, class_T = row_T[order_T], class_T[order_T]
    num_pictures = int(row_T[-1]) + 1 if len(row_T) else 0
    # In slices, because a table of all pictures of a large set would not fit.
    for first in range(0, num_pictures, SLICE_PICTURES):
        begin, end = np.searchsorted(row_T, (first, first + SLICE_PICTURES))
        holds_SC = np.zeros((SLICE_PICTURES, num_classes), np.float32)
        holds_SC[row_T[begin:end] - first, class_T[begin:end]] = 1
        together_CC += holds_SC.T @ holds_SC
    return together_CC.astype(np.int64)


# A finished grouping: the heads, and a remark on each for people.


@dataclass(frozen=True)
class Grouping:
    """Heads that share all classes out, each with a comment ("" for none)."""

    config: HeadConfig
    comments: tuple[str, ...]


def make_grouping(
    grouping: str, classes_H: Iterable[Sequence[int]], names: Sequence[str], comments: Sequence[str]
) -> Grouping:
    """Heads of equal weight, their classes ascending."""
    heads = [
        HeadGroup(tuple(sorted(map(int, classes))), 1.0, name) for classes, name in zip(classes_H, names, strict=True)
    ]
    num_classes = sum(len(head.classes) for head in heads)
    return Grouping(HeadConfig(num_classes, tuple(heads), grouping), tuple(comments))


def members_of(label_C: np.ndarray) -> list[np.ndarray]:
    """The classes of each label, from label 0 on; every label up to the largest has some."""
    return [np.flatnonzero(label_C == label) for label in range(int(label_C.max()) + 1)]


def check_heads(heads: int, num_classes: int) -> None:
    """ConfigError unless so many heads can each have a class."""
    if not 1 <= heads <= num_classes:
        raise ConfigError(f"--heads {heads}: {num_classes} classes can be shared out to 1 to {num_classes} heads.")
