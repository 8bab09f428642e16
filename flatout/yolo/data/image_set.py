"""A data set after the scan: pictures, their sizes and all their labels, as a few flat arrays.

Dimension key:  N pictures   T labels of all pictures   P polygon points of all labels
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
