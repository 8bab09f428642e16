"""One picture of the set: objects of all kinds and sizes before a ground, and where they are.

Dimension key:  H, W rows and columns of the picture
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from flatout.yolo.demo_data.stamp import SHAPES, Outline, lay_into, make_stamp, mask_in

# What lies behind the objects: a slope between two colours, clouds, clutter that has no name, a camera's grain.
#
# Colours are BGR, 0 to 255; pictures are float32 [H, W, 3] until grain finishes them.

PALETTES = (
    ((96, 70, 48), (176, 150, 110)),
    ((70, 92, 60), (160, 186, 150)),
    ((70, 78, 120), (170, 190, 222)),
    ((110, 74, 96), (196, 168, 184)),
    ((58, 58, 62), (150, 152, 158)),
    ((150, 158, 150), (226, 228, 218)),
    ((112, 104, 60), (202, 196, 150)),
    ((44, 66, 104), (120, 160, 206)),
)
"""The two ends of a slope: calm colours, so that the objects carry the strong ones."""
CLOUDS = ((4, 20.0), (9, 10.0), (40, 6.0))
"""Spots across the picture, rising, and how much they brighten or darken it."""


def draw_ground(width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """A cluttered ground without any object, float32 [H, W, 3]."""
    image = _clouded_slope(width, height, rng)
    for draw, (least, most), opacity in CLUTTER:
        # OpenCV smooths edges in pictures of 8 bits only.
        cluttered = np.clip(image, 0, 255).astype(np.uint8)
        for _ in range(rng.integers(least, most + 1)):
            draw(cluttered, rng.integers(20, 236, 3).tolist(), rng)
        image = cv2.addWeighted(cluttered, opacity, image, 1 - opacity, 0, dtype=cv2.CV_32F)
    return image


def add_grain(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The finished picture, uint8 [H, W, 3]."""
    grain = rng.standard_normal(image.shape[:2], np.float32)[..., None] * rng.uniform(1.5, 6)
    finished: np.ndarray = np.clip(image + grain, 0, 255).astype(np.uint8)
    return finished


def _clouded_slope(width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """From one colour to another, with soft spots of several sizes: mostly in brightness, a little in colour."""
    ground = _slope(8, 6, rng)
    for cells, strength in CLOUDS:
        rows = max(2, cells * height // width)
        spots = rng.standard_normal((rows, cells, 1)) + 0.4 * rng.standard_normal((rows, cells, 3))
        # From grid to finer grid: only the last step, to the picture, costs time.
        ground = cv2.resize(ground, (cells, rows), interpolation=cv2.INTER_CUBIC) + strength * spots
    return np.asarray(cv2.resize(ground.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC))


def _slope(width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    dark, light = np.array(PALETTES[rng.integers(len(PALETTES))], np.float64)
    angle = rng.uniform(0, 2 * math.pi)
    x, y = np.linspace(-1, 1, width), np.linspace(-1, 1, height)[:, None]
    share = 0.5 + 0.35 * (x * math.cos(angle) + y * math.sin(angle))
    return np.asarray(dark + (light - dark) * share[..., None])


def _band(image: np.ndarray, colour: list[int], rng: np.random.Generator) -> None:
    cv2.line(image, _spot(image, rng), _spot(image, rng), colour, int(rng.integers(8, 22)), cv2.LINE_AA)


def _thread(image: np.ndarray, colour: list[int], rng: np.random.Generator) -> None:
    """A thin curve: a parabola given by three points, drawn in eighths of pixels."""
    begin, middle, end = (np.array(_spot(image, rng)) for _ in range(3))
    t = np.linspace(0, 1, 24)[:, None]
    curve = np.round(8 * ((1 - t) ** 2 * begin + 2 * t * (1 - t) * middle + t**2 * end)).astype(np.int32)
    cv2.polylines(image, [curve], False, colour, int(rng.integers(1, 4)), cv2.LINE_AA, 3)


def _crumb(image: np.ndarray, colour: list[int], rng: np.random.Generator) -> None:
    axes = rng.integers(2, 7, 2).tolist()
    cv2.ellipse(image, _spot(image, rng), axes, rng.uniform(0, 180), 0, 360, colour, -1, cv2.LINE_AA)


def _spot(image: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    height, width = image.shape[:2]
    return int(rng.integers(width)), int(rng.integers(height))


CLUTTER = ((_band, (0, 2), 0.3), (_thread, (2, 6), 0.7), (_crumb, (4, 14), 0.8))
"""What is strewn, how many of it, how strongly."""


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
