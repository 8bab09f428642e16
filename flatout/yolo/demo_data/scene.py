"""One picture of the set: objects of all kinds and sizes before a ground, and where they are.

Dimension key:  H, W rows and columns of the picture
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flatout.yolo.demo_data.ground import add_grain, draw_ground
from flatout.yolo.demo_data.shapes import SHAPES
from flatout.yolo.demo_data.stamp import Outline, lay_into, make_stamp, mask_in

SIDE_PX = (16, 160)
"""Both sides of every object's box lie in this range."""
USUAL_LEAST_PX = 22
"""Of the circle around a shape; most shapes fill less of it than a box does."""
MOST_COVERED = 0.2
"""Share of the smaller of two objects' boxes that both may have in common."""
MOST_OUTSIDE = 0.15
"""Share of an object's side that may lie outside of the picture."""
OBJECTS = (2, 6)
TRIES = 20
"""Places tried for an object before the picture goes without it."""

Box = tuple[int, int, int, int]
"""x1, y1, x2, y2 in pixels; the last pixels are x2 - 1 and y2 - 1."""


class Placed(NamedTuple):
    """An object in the picture."""

    name: str
    box: Box
    """Around the whole object as far as it is inside of the picture, whatever covers it."""
    mask_HW: np.ndarray
    """bool: the pixels within the box that are its own, whatever covers them."""


class Scene(NamedTuple):
    """A finished picture, uint8 [H, W, 3] BGR, and its objects from back to front."""

    image: np.ndarray
    objects: list[Placed]


def draw_scene(width: int, height: int, rng: np.random.Generator) -> Scene:
    """The picture that these random numbers make."""
    image = draw_ground(width, height, rng)
    objects: list[Placed] = []
    for _ in range(rng.integers(OBJECTS[0], OBJECTS[1] + 1)):
        name = list(SHAPES)[rng.integers(len(SHAPES))]
        for _ in range(TRIES):
            stamp = make_stamp(_choose_outline(name, width, height, rng))
            mask_HW = mask_in(stamp, width, height)
            box = bounding_box(mask_HW)
            if _size_is_right(box) and _has_room(box, objects):
                lay_into(image, stamp, rng)
                objects.append(Placed(name, box, mask_HW))
                break
    return Scene(add_grain(image, rng), objects)


def bounding_box(mask_HW: np.ndarray) -> Box:
    """The smallest box around all marked pixels; empty where there are none."""
    columns, rows = np.flatnonzero(mask_HW.any(0)), np.flatnonzero(mask_HW.any(1))
    if not len(columns):
        return 0, 0, 0, 0
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _choose_outline(name: str, width: int, height: int, rng: np.random.Generator) -> Outline:
    # Small ones are as frequent as large ones: sizes are even on a logarithmic scale.
    most = min(SIDE_PX[1], 0.7 * min(width, height))
    radius = 0.5 * math.exp(rng.uniform(math.log(USUAL_LEAST_PX), math.log(most)))
    stretch = math.exp(rng.uniform(-0.14, 0.14))
    inset = (1 - 2 * MOST_OUTSIDE) * radius
    centre_xy = (rng.uniform(inset, width - inset), rng.uniform(inset, height - inset))
    return Outline(name, centre_xy, (radius * stretch, radius / stretch), rng.uniform(0, 2 * math.pi))


def _size_is_right(box: Box) -> bool:
    x1, y1, x2, y2 = box
    return all(SIDE_PX[0] <= side <= SIDE_PX[1] for side in (x2 - x1, y2 - y1))


def _has_room(box: Box, objects: Sequence[Placed]) -> bool:
    return all(_share_in_common(box, other.box) <= MOST_COVERED for other in objects)


def _share_in_common(one: Box, other: Box) -> float:
    """Of the smaller one: a large object must not hide a small one, nor a small one sit within a large."""
    (x1, y1, x2, y2), (u1, v1, u2, v2) = one, other
    common = max(0, min(x2, u2) - max(x1, u1)) * max(0, min(y2, v2) - max(y1, v1))
    return common / min((x2 - x1) * (y2 - y1), (u2 - u1) * (v2 - v1))
