"""How often is a picture drawn when rare classes shall be seen more often?

Dimension key:  N pictures   C classes   T labels of all pictures
"""

import numpy as np

from flatout.yolo.data.image_set import ImageSet, Labels


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


class Weighing:
    """Sampling weights of pictures: classes that are rare and not yet found well are shown more often."""

    def __init__(self, images: ImageSet, num_classes: int) -> None:
        self._labels = images.labels
        self.never_found = [0.0] * num_classes
        """Scores before the first validation."""
        self._class_weights = class_weights(class_counts(images.labels, num_classes))

    def __call__(self, map_C: np.ndarray) -> np.ndarray:
        return image_weights(self._labels, epoch_class_weights(self._class_weights, map_C))
