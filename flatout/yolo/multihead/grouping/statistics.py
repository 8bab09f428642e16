"""Statistics of classes for grouping: number and shape of boxes, co-occurrence in images; and the result, a Grouping.

Dimension key:  T boxes   C classes   S images of one slice   H heads
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.multihead.head_config import HeadConfig, HeadGroup

MIN_SIDE_PX = 1.0
"""Both sides of a box must be larger than this for its shape to count."""
SLICE_IMAGES = 4096


@dataclass(frozen=True)
class BoxTable:
    """All boxes of a data set, in any order."""

    image_T: np.ndarray
    """int64: number of the image."""
    class_T: np.ndarray
    """int64."""
    size_wh_px_T2: np.ndarray
    """float64, in pixels of the image."""


@dataclass(frozen=True)
class ClassStatistics:
    """Statistics of every class of a data set."""

    num_boxes_C: np.ndarray
    """int64: number of boxes of any size."""
    log_ratio_C: np.ndarray
    """float64: mean of ln(width / height); 0 for a class without boxes."""
    together_CC: np.ndarray
    """int64: number of images with both classes; on the diagonal, of images with the class."""

    @property
    def num_classes(self) -> int:
        return len(self.num_boxes_C)


def statistics_of(boxes: BoxTable, num_classes: int) -> ClassStatistics:
    """Statistics of boxes with classes 0 to num_classes - 1."""
    return ClassStatistics(
        np.bincount(boxes.class_T, minlength=num_classes),
        mean_log_ratio(boxes.class_T, boxes.size_wh_px_T2, num_classes),
        images_together(boxes.image_T, boxes.class_T, num_classes),
    )


def mean_log_ratio(class_T: np.ndarray, size_wh_px_T2: np.ndarray, num_classes: int) -> np.ndarray:
    """Mean of ln(width / height) per class, float64 [C]."""
    large_T = (size_wh_px_T2 > MIN_SIDE_PX).all(1)
    width_T, height_T = size_wh_px_T2[large_T].T
    sum_C = np.bincount(class_T[large_T], np.log(width_T / height_T), num_classes)
    count_C = np.bincount(class_T[large_T], minlength=num_classes)
    return np.asarray(sum_C / np.maximum(count_C, 1))


def images_together(image_T: np.ndarray, class_T: np.ndarray, num_classes: int) -> np.ndarray:
    """Number of images with both of two classes, int64 [C, C]; several boxes of a class in an image count once."""
    together_CC = np.zeros((num_classes, num_classes))
    row_T = np.unique(image_T, return_inverse=True)[1].ravel()
    order_T = np.argsort(row_T, kind="stable")
    row_T, class_T = row_T[order_T], class_T[order_T]
    num_images = int(row_T[-1]) + 1 if len(row_T) else 0
    # In slices, because a table of all images of a large data set would not fit into memory.
    for first in range(0, num_images, SLICE_IMAGES):
        begin, end = np.searchsorted(row_T, (first, first + SLICE_IMAGES))
        present_SC = np.zeros((SLICE_IMAGES, num_classes), np.float32)
        present_SC[row_T[begin:end] - first, class_T[begin:end]] = 1
        together_CC += present_SC.T @ present_SC
    return together_CC.astype(np.int64)


@dataclass(frozen=True)
class Grouping:
    """A head configuration, with a comment for each head ("" for none)."""

    config: HeadConfig
    comments: tuple[str, ...]


def make_grouping(
    grouping: str, classes_H: Iterable[Sequence[int]], names: Sequence[str], comments: Sequence[str]
) -> Grouping:
    """A grouping with heads of equal weight and sorted classes."""
    heads = [
        HeadGroup(tuple(sorted(map(int, classes))), 1.0, name) for classes, name in zip(classes_H, names, strict=True)
    ]
    num_classes = sum(len(head.classes) for head in heads)
    return Grouping(HeadConfig(num_classes, tuple(heads), grouping), tuple(comments))


def members_of(label_C: np.ndarray) -> list[np.ndarray]:
    """The classes of each label, from label 0 on; every label up to the largest must occur."""
    return [np.flatnonzero(label_C == label) for label in range(int(label_C.max()) + 1)]


def check_heads(heads: int, num_classes: int) -> None:
    """ConfigError unless every head can have a class."""
    if not 1 <= heads <= num_classes:
        raise ConfigError(f"--heads {heads}: {num_classes} classes can be divided among 1 to {num_classes} heads.")
