"""Outlines of the six kinds of objects, as distances.

Every shape fits the unit circle. `distance(points)` is negative inside, positive outside, and near the edge as large
as the way to it: so a smooth edge is `0.5 - distance * radius_px`, whatever the size or the turn.

Dimension key:  H, W rows and columns of a patch
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Points(NamedTuple):
    """The middles of a patch's pixels in a shape's own frame: float32 [H, W] each."""

    x: np.ndarray
    y: np.ndarray

    @property
    def radius(self) -> np.ndarray:
        radius: np.ndarray = np.hypot(self.x, self.y)
        return radius


Distance = Callable[[Points], np.ndarray]

RING_WIDTH = 0.36
CROSS_REACH, CROSS_WIDTH = 0.94, 0.34
"""Half the length and half the width of a bar."""
STAR_INNER = 0.48
BOX_SIDE = 0.78
"""Half the side; rounding brings the corners back to the circle."""
BOX_CORNER = 0.18


def ring(points: Points) -> np.ndarray:
    return np.abs(points.radius - (1 - RING_WIDTH / 2)) - RING_WIDTH / 2


def cross(points: Points) -> np.ndarray:
    x, y = np.abs(points.x), np.abs(points.y)
    lying = np.maximum(x - CROSS_REACH, y - CROSS_WIDTH)
    standing = np.maximum(y - CROSS_REACH, x - CROSS_WIDTH)
    either: np.ndarray = np.minimum(lying, standing)
    return either


def star(points: Points) -> np.ndarray:
    """Five points: the plane is folded ten times, then one straight edge is left."""
    x, y = _folded(points, 5)
    tip, notch = (1.0, 0.0), (STAR_INNER * math.cos(math.pi / 5), STAR_INNER * math.sin(math.pi / 5))
    along = (notch[0] - tip[0], notch[1] - tip[1])
    length = math.hypot(*along)
    return ((x - tip[0]) * -along[1] + (y - tip[1]) * along[0]) / -length


def triangle(points: Points) -> np.ndarray:
    """Equilateral: folded six times, the edge lies at half the radius."""
    x, y = _folded(points, 3)
    return x * math.cos(math.pi / 3) + y * math.sin(math.pi / 3) - 0.5


def ball(points: Points) -> np.ndarray:
    return points.radius - 1


def box(points: Points) -> np.ndarray:
    """A square with rounded corners."""
    x, y = np.abs(points.x) - (BOX_SIDE - BOX_CORNER), np.abs(points.y) - (BOX_SIDE - BOX_CORNER)
    outside = np.hypot(np.maximum(x, 0), np.maximum(y, 0))
    distance: np.ndarray = outside + np.minimum(np.maximum(x, y), 0) - BOX_CORNER
    return distance


SHAPES: dict[str, Distance] = {
    "ring": ring,
    "cross": cross,
    "star": star,
    "triangle": triangle,
    "ball": ball,
    "box": box,
}
"""The classes, in the order of their numbers."""


def _folded(points: Points, corners: int) -> tuple[np.ndarray, np.ndarray]:
    """Mirror every point into the wedge between a corner on the x axis and the middle of the next edge."""
    wedge = 2 * math.pi / corners
    angle = np.arctan2(points.y, points.x)
    angle = np.abs((angle + wedge / 2) % wedge - wedge / 2)
    return points.radius * np.cos(angle), points.radius * np.sin(angle)
