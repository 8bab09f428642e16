"""One object, cut out and ready to be laid into a picture.

Dimension key:  H, W rows and columns of the picture   h, w of the patch that holds the object
"""

import math
from typing import NamedTuple

import cv2
import numpy as np

from flatout.yolo.demo_data.shapes import SHAPES, Points
from flatout.yolo.demo_data.surfaces import paint

LIGHT_XY = (-0.57, -0.82)
"""Where the light comes from, in the picture; of length 1."""
SHADOW = 0.4


class Outline(NamedTuple):
    """Where an object is, in pixels of the picture, and how it is turned."""

    name: str
    centre_xy: tuple[float, float]
    radius_xy: tuple[float, float]
    angle: float


class Stamp(NamedTuple):
    """An outline in the pixels around it. The patch may reach beyond the picture."""

    outline: Outline
    left: int
    top: int
    points: Points
    """Of the patch's pixels, in the frame of the shape."""
    distance_hw: np.ndarray
    cover_hw: np.ndarray
    """float32: which share of a pixel belongs to the object."""


def make_stamp(outline: Outline) -> Stamp:
    """The patch around an outline."""
    reach = math.ceil(1.15 * max(outline.radius_xy)) + 2
    left, top = (math.floor(centre) - reach for centre in outline.centre_xy)
    across = np.arange(2 * reach + 1, dtype=np.float32) + 0.5
    dx, dy = left + across - outline.centre_xy[0], (top + across - outline.centre_xy[1])[:, None]
    cos, sin = math.cos(outline.angle), math.sin(outline.angle)
    radius_x, radius_y = outline.radius_xy
    points = Points((dx * cos + dy * sin) / radius_x, (dy * cos - dx * sin) / radius_y)
    distance_hw = SHAPES[outline.name](points)
    cover_hw = np.clip(0.5 - distance_hw * min(outline.radius_xy), 0, 1)
    return Stamp(outline, left, top, points, distance_hw, cover_hw)


def lay_into(image: np.ndarray, stamp: Stamp, rng: np.random.Generator) -> None:
    """Paint the object and its shadow over a picture, float32 [H, W, 3]."""
    radius = min(stamp.outline.radius_xy)
    soft_hw = cv2.GaussianBlur(stamp.cover_hw, (0, 0), max(1.0, 0.1 * radius))
    shift = max(1, round(0.1 * radius))
    _blend(image, np.zeros((1, 1, 3), np.float32), SHADOW * soft_hw, stamp.left + shift, stamp.top + shift)
    colours = paint(stamp.outline.name, stamp.points, stamp.distance_hw, _light_on(stamp), rng)
    _blend(image, colours, stamp.cover_hw, stamp.left, stamp.top)


def mask_in(stamp: Stamp, width: int, height: int) -> np.ndarray:
    """The pixels of the picture of which half or more belongs to the object, bool [H, W]."""
    mask_HW = np.zeros((height, width), bool)
    there, inside = _windows((stamp.top, stamp.left), stamp.cover_hw.shape, (height, width))
    mask_HW[there] = stamp.cover_hw[inside] >= 0.5
    return mask_HW


def _light_on(stamp: Stamp) -> np.ndarray:
    """-1 on the side away from the light to 1 towards it, [h, w]."""
    (centre_x, centre_y), (h, w) = stamp.outline.centre_xy, stamp.cover_hw.shape
    dx = stamp.left + np.arange(w, dtype=np.float32) - centre_x
    dy = stamp.top + np.arange(h, dtype=np.float32)[:, None] - centre_y
    return (dx * LIGHT_XY[0] + dy * LIGHT_XY[1]) / max(stamp.outline.radius_xy)


def _blend(image: np.ndarray, colours: np.ndarray, cover_hw: np.ndarray, left: int, top: int) -> None:
    there, inside = _windows((top, left), cover_hw.shape, image.shape[:2])
    over = np.broadcast_to(colours, (*cover_hw.shape, 3))[inside]
    image[there] += (over - image[there]) * cover_hw[inside][..., None]


def _windows(
    begin_yx: tuple[int, int], patch_hw: tuple[int, ...], image_hw: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """What of a patch is inside of the picture: as a window of the picture, and of the patch."""
    there, inside = [], []
    for begin, length, limit in zip(begin_yx, patch_hw, image_hw, strict=True):
        low, high = max(begin, 0), min(begin + length, limit)
        there.append(slice(low, high))
        inside.append(slice(low - begin, high - begin))
    return tuple(there), tuple(inside)
