"""Turn and shear by what a mosaic shows: each head of the network has ranges of its own for its classes.

Dimension key:  N pictures   H heads   Q mosaics of four   T labels of all pictures
"""

from dataclasses import dataclass

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.data.image_set import Labels


@dataclass(frozen=True)
class ClassAware:
    """Ranges of the heads, and how many labels of each head every picture has."""

    degrees_H: np.ndarray
    shear_H: np.ndarray
    count_NH: np.ndarray
    """int64."""

    @classmethod
    def of(cls, labels: Labels, head_of_class: np.ndarray, degrees_H: np.ndarray, shear_H: np.ndarray) -> "ClassAware":
        """For the labels of a data set; `head_of_class` says which head a class belongs to."""
        head_of_class, num_heads = np.asarray(head_of_class), len(degrees_H)
        if len(shear_H) != num_heads or head_of_class.min() < 0 or head_of_class.max() >= num_heads:
            raise ConfigError(
                f"{num_heads} heads have degrees, {len(shear_H)} have shear, and classes belong to heads "
                f"{head_of_class.min()} to {head_of_class.max()}: give one of each for every head."
            )
        picture_T = np.repeat(np.arange(len(labels.first_N) - 1), np.diff(labels.first_N))
        head_T = head_of_class[labels.class_box_T5[:, 0].astype(np.int64)]
        count_NH = np.zeros((len(labels.first_N) - 1, num_heads), np.int64)
        np.add.at(count_NH, (picture_T, head_T), 1)
        return cls(np.asarray(degrees_H, np.float64), np.asarray(shear_H, np.float64), count_NH)

    def reach(self, picture_Q4: np.ndarray, uniform_Q: np.ndarray) -> np.ndarray:
        """Degrees and shear of mosaics of four pictures, float64 [Q, 2]: those of a head that is drawn.

        A head's probability is its share of the mosaic's labels; all are equal where there is none.
        """
        count_QH = self.count_NH[picture_Q4].sum(1)
        count_QH = np.where(count_QH.any(1, keepdims=True), count_QH, 1)
        below_QH = np.cumsum(count_QH, axis=1) <= uniform_Q[:, None] * count_QH.sum(1, keepdims=True)
        head_Q = below_QH.sum(1)
        return np.stack((self.degrees_H[head_Q], self.shear_H[head_Q]), axis=1)
