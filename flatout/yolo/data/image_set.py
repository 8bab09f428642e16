"""A data set after the scan: images, their sizes and all their labels as a few flat arrays; and sampling weights.

Dimension key:  N images   T labels of all images   P polygon points of all labels   C classes
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


def ranges(begin_G: np.ndarray, count_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """begin, begin + 1, ... of every range, one after the other, and the number of the range each belongs to."""
    owner = np.repeat(np.arange(len(count_G)), count_G)
    return np.arange(len(owner)) + (begin_G - offsets(count_G)[:-1])[owner], owner


def offsets(count_G: np.ndarray) -> np.ndarray:
    """Begin of each of consecutive ranges, and the end of the last, int64 [G + 1]."""
    return np.concatenate(([0], np.cumsum(count_G, dtype=np.int64)))


@dataclass(frozen=True)
class Labels:
    """The labels of all images, concatenated. A label without a polygon has no points."""

    class_box_T5: np.ndarray
    """float32: class, then centre x, centre y, width and height relative to the image."""
    first_N: np.ndarray
    """int64 [N + 1]: image i has the labels first_N[i] up to, but not including, first_N[i + 1]."""
    point_P2: np.ndarray
    """float32: x and y of polygon points relative to the image."""
    first_point_T: np.ndarray
    """int64 [T + 1]: label t has the points first_point_T[t] up to, but not including, first_point_T[t + 1]."""

    @cached_property
    def outline_T4(self) -> np.ndarray:
        """Bounding box of the points of each label: x1, y1, x2, y2, float32; zeros where it has none."""
        outline_T4 = np.zeros((len(self.first_point_T) - 1, 4), np.float32)
        has_points_T = np.diff(self.first_point_T) > 0
        if has_points_T.any():
            begin = self.first_point_T[:-1][has_points_T]
            outline_T4[has_points_T, :2] = np.minimum.reduceat(self.point_P2, begin)
            outline_T4[has_points_T, 2:] = np.maximum.reduceat(self.point_P2, begin)
        return outline_T4

    @cached_property
    def image_T(self) -> np.ndarray:
        """The image of each label, int64."""
        return np.repeat(np.arange(len(self.first_N) - 1), np.diff(self.first_N))

    @cached_property
    def has_polygon_N(self) -> np.ndarray:
        """Whether any label of an image has points, bool."""
        first_point_N = self.first_point_T[self.first_N]
        return np.asarray(first_point_N[1:] > first_point_N[:-1])

    def of(self, image: int) -> np.ndarray:
        """Class and box of the labels of one image, [n, 5]; a view."""
        return self.class_box_T5[self.first_N[image] : self.first_N[image + 1]]

    def polygons_of(self, image: int) -> list[np.ndarray]:
        """Points of the labels of one image, one [points, 2] view each; empty where a label is only a box."""
        begin, end = self.first_N[image], self.first_N[image + 1]
        return [self.point_P2[self.first_point_T[label] : self.first_point_T[label + 1]] for label in range(begin, end)]


@dataclass(frozen=True)
class ImageSet:
    """The images of a split in their order, with everything that training needs to know before it reads them."""

    paths: tuple[str, ...]
    size_wh_N2: np.ndarray
    """int32: width and height of the upright image, after applying the EXIF orientation."""
    labels: Labels
    names: tuple[str, ...]
    """Names of the classes."""

    def __len__(self) -> int:
        return len(self.paths)


# Sampling weights, for --image-weights


def class_counts(labels: Labels, num_classes: int) -> np.ndarray:
    """Number of labels of each class, int64 [C]; higher class numbers are ignored."""
    class_T = labels.class_box_T5[:, 0].astype(np.int64)
    return np.bincount(class_T[class_T < num_classes], minlength=num_classes)


def class_weights(counts_C: np.ndarray) -> np.ndarray:
    """Weight of each class: the inverse of its count, normalised to a sum of 1; float64 [C].

    A class without labels is treated as if it had one.
    """
    inverse_C = 1 / np.maximum(counts_C, 1)
    return np.asarray(inverse_C / inverse_C.sum())


def epoch_class_weights(weights_C: np.ndarray, map_C: np.ndarray) -> np.ndarray:
    """Class weights of the next epoch: lower for classes with a high mAP in the last validation; float64 [C]."""
    return np.asarray(weights_C * (1 - map_C) ** 2)


def image_weights(labels: Labels, weights_C: np.ndarray) -> np.ndarray:
    """Weight of each image: the sum of the class weights of its labels; float64 [N]."""
    class_T = labels.class_box_T5[:, 0].astype(np.int64)
    weight_T = weights_C[np.minimum(class_T, len(weights_C) - 1)]
    return np.bincount(labels.image_T, weight_T, minlength=len(labels.first_N) - 1)


class ImageWeights:
    """Sampling weights that prefer images with rare classes and with classes of low mAP."""

    def __init__(self, images: ImageSet, num_classes: int) -> None:
        self._labels = images.labels
        self.initial_map = [0.0] * num_classes
        """The mAP of each class to use before the first validation."""
        self._class_weights = class_weights(class_counts(images.labels, num_classes))

    def __call__(self, map_C: np.ndarray) -> np.ndarray:
        """Weight of each image for the next epoch, float64 [N], given the mAP of each class."""
        return image_weights(self._labels, epoch_class_weights(self._class_weights, map_C))
