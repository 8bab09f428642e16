"""A data set after the scan: pictures, their sizes and all their labels, as a few flat arrays.

Dimension key:  N pictures   T labels of all pictures   P polygon points of all labels

How often is a picture drawn when rare classes shall be seen more often?

Dimension key:  N pictures   C classes   T labels of all pictures
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Labels:
    """Labels of all pictures, one after the other. What has no polygon has no points."""

    class_box_T5: np.ndarray
    """float32: class, then centre x, centre y, width, height divided by the picture's size."""
    first_N: np.ndarray
    """int64 [N + 1]: picture i has the labels first_N[i] to first_N[i + 1]."""
    point_P2: np.ndarray
    """float32: x, y of polygon points divided by the picture's size."""
    first_point_T: np.ndarray
    """int64 [T + 1]: label t has the points first_point_T[t] to first_point_T[t + 1]."""

    @cached_property
    def outline_T4(self) -> np.ndarray:
        """Least and greatest x, y of each label's points: x1, y1, x2, y2, float32; zeros where it has none."""
        outline_T4 = np.zeros((len(self.first_point_T) - 1, 4), np.float32)
        has_points_T = np.diff(self.first_point_T) > 0
        if has_points_T.any():
            begin = self.first_point_T[:-1][has_points_T]
            outline_T4[has_points_T, :2] = np.minimum.reduceat(self.point_P2, begin)
            outline_T4[has_points_T, 2:] = np.maximum.reduceat(self.point_P2, begin)
        return outline_T4

    @cached_property
    def has_polygon_N(self) -> np.ndarray:
        """bool: whether any label of a picture has points."""
        first_point_N = self.first_point_T[self.first_N]
        return np.asarray(first_point_N[1:] > first_point_N[:-1])

    def of(self, picture: int) -> np.ndarray:
        """Class and box of one picture's labels, [n, 5]; a view."""
        return self.class_box_T5[self.first_N[picture] : self.first_N[picture + 1]]

    def polygons_of(self, picture: int) -> list[np.ndarray]:
        """Points of one picture's labels, one [points, 2] view each; empty where a label is only a box."""
        begin, end = self.first_N[picture], self.first_N[picture + 1]
        return [self.point_P2[self.first_point_T[label] : self.first_point_T[label + 1]] for label in range(begin, end)]


@dataclass(frozen=True)
class ImageSet:
    """Pictures in their order, with what training needs to know before it reads any."""

    paths: tuple[str, ...]
    size_wh_N2: np.ndarray
    """int32: width and height after the orientation in EXIF is obeyed."""
    labels: Labels
    names: tuple[str, ...]
    """Of the classes."""

    def __len__(self) -> int:
        return len(self.paths)


def class_counts(labels: Labels, num_classes: int) -> np.ndarray:
    """Labels of each class, int64 [C]; classes beyond are left out."""
    class_T = labels.class_box_T5[:, 0].astype(np.int64)
    return np.bincount(class_T[class_T < num_classes], minlength=num_classes)


def class_weights(counts_C: np.ndarray) -> np.ndarray:
    """Weight of each class: the inverse of its count, summing to 1; float64 [C]. A class without labels counts as 1."""
    inverse_C = 1 / np.maximum(counts_C, 1)
    weights_C: np.ndarray = inverse_C / inverse_C.sum()
    return weights_C


def epoch_class_weights(weights_C: np.ndarray, map_C: np.ndarray) -> np.ndarray:
    """Classes that are found well already, by the mAP of the last validation, weigh less; float64 [C]."""
    lessened_C: np.ndarray = weights_C * (1 - map_C) ** 2
    return lessened_C


def image_weights(labels: Labels, weights_C: np.ndarray) -> np.ndarray:
    """Weight of each picture: the weights of its labels' classes summed; float64 [N]."""
    class_T = labels.class_box_T5[:, 0].astype(np.int64)
    label_T = weights_C[np.minimum(class_T, len(weights_C) - 1)]
    picture_T = np.repeat(np.arange(len(labels.first_N) - 1), np.diff(labels.first_N))
    return np.bincount(picture_T, label_T, minlength=len(labels.first_N) - 1)


def draw_by_weight(weights_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The pictures of one epoch, drawn with replacement, int64 [N]; without any label all are equally likely."""
    total = weights_N.sum()
    chances_N = weights_N / total if total > 0 else None
    return rng.choice(len(weights_N), len(weights_N), p=chances_N)


# `--image-weights`: which pictures are shown more often in the next epoch.


class ImageWeights:
    """Sampling weights of pictures: classes that are rare and not yet found well are shown more often."""

    def __init__(self, images: ImageSet, num_classes: int) -> None:
        self._labels = images.labels
        self.never_found = [0.0] * num_classes
        """Scores before the first validation."""
        self._class_weights = class_weights(class_counts(images.labels, num_classes))

    def __call__(self, map_C: np.ndarray) -> np.ndarray:
        return image_weights(self._labels, epoch_class_weights(self._class_weights, map_C))
