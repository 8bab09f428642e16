"""Pixels of a sample, the plain way: each step a function from picture to picture, in OpenCV.

Pictures are uint8 [h, w, 3], BGR, until they are delivered.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import cv2
import numpy as np

from flatout.profiler import clock
from flatout.yolo.augment.color import Color
from flatout.yolo.data.letterbox import PADDING


class Placed(NamedTuple):
    """One sheet, ready to be painted."""

    tiles: list[np.ndarray]
    origin_K2: np.ndarray
    """int64 x, y of each tile's first pixel on the canvas."""
    canvas_wh: tuple[int, int]
    copied: list[np.ndarray]
    """Polygons to be pasted again, mirrored; in canvas pixels."""
    matrix_33: np.ndarray
    out_wh: tuple[int, int]
    is_mosaic: bool
    perspective: bool


class Painter(Protocol):
    """A way to paint samples. What a method returns may be overwritten by the next call of the same method."""

    def paint(self, placed: Placed, *, slot: int = 0) -> np.ndarray:
        """The sheet, warped. `slot` 0 or 1: two sheets of a sample are held at a time."""

    def mix(self, image: np.ndarray, other: np.ndarray, share: float) -> np.ndarray: ...

    def recolor(self, image: np.ndarray, color: Color) -> np.ndarray:
        """Change hue, saturation and value; the result is BGR."""

    def deliver(self, image: np.ndarray, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        """Flip and write as RGB planes."""

    def finish(self, image: np.ndarray, color: Color, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        """`recolor` and `deliver` at once, for samples into which nothing is pasted between them."""


class Classic:
    """Step by step, a new picture each time."""

    def paint(self, placed: Placed, *, slot: int = 0) -> np.ndarray:
        with clock.stage("mosaic"):
            canvas = compose(placed.tiles, placed.origin_K2, placed.canvas_wh)
            paste_copies(canvas, placed.copied)
        if not placed.is_mosaic and np.array_equal(placed.matrix_33, np.eye(3)):
            return canvas
        return warp(canvas, placed.matrix_33, placed.out_wh, perspective=placed.perspective)

    def mix(self, image: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
        return np.asarray((image * share + other * (1 - share)).astype(np.uint8))

    def recolor(self, image: np.ndarray, color: Color) -> np.ndarray:
        planes = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
        hsv = cv2.merge([cv2.LUT(plane, table_V) for plane, table_V in zip(planes, color.table_3V, strict=True)])
        return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR))

    def deliver(self, image: np.ndarray, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        up_down, left_right = flip_2
        image = image[::-1] if up_down else image
        image = image[:, ::-1] if left_right else image
        out_CHW[:] = image[..., ::-1].transpose(2, 0, 1)

    def finish(self, image: np.ndarray, color: Color, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        with clock.stage("color"):
            image = self.recolor(image, color)
        with clock.stage("deliver"):
            self.deliver(image, flip_2, out_CHW)


def compose(tiles: list[np.ndarray], origin_K2: np.ndarray, canvas_wh: tuple[int, int]) -> np.ndarray:
    """Tiles on a grey canvas, cut at its borders, later ones over earlier ones."""
    canvas = np.full((canvas_wh[1], canvas_wh[0], 3), PADDING, np.uint8)
    for tile, (x, y) in zip(tiles, origin_K2.tolist(), strict=True):
        place(tile, x, y, canvas)
    return canvas


def paste_copies(canvas: np.ndarray, polygons: Sequence[np.ndarray]) -> None:
    """Mirror the polygons' pixels left to right, over the canvas uint8 [h, w, 3], in place. Black does not cover."""
    if not polygons:
        return
    mask = np.zeros(canvas.shape[:2], np.uint8)
    for polygon in polygons:
        cv2.drawContours(mask, [polygon.astype(np.int32)], -1, 1, cv2.FILLED)
    mirrored = cv2.flip(cv2.bitwise_and(canvas, canvas, mask=mask), 1)
    np.copyto(canvas, mirrored, where=mirrored > 0)


def place(tile: np.ndarray, x: int, y: int, canvas: np.ndarray) -> None:
    """Copy what of a tile at x, y lies on the canvas."""
    if (both := visible(tile, x, y, canvas)) is not None:
        both[1][:] = both[0]


def visible(tile: np.ndarray, x: int, y: int, canvas: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The part of a tile at x, y that lies on the canvas, and that part of the canvas; None if there is none."""
    x1, y1 = max(x, 0), max(y, 0)
    x2, y2 = min(x + tile.shape[1], canvas.shape[1]), min(y + tile.shape[0], canvas.shape[0])
    if x1 >= x2 or y1 >= y2:
        return None
    return tile[y1 - y : y2 - y, x1 - x : x2 - x], canvas[y1:y2, x1:x2]


def warp(
    canvas: np.ndarray,
    matrix_33: np.ndarray,
    out_wh: tuple[int, int],
    *,
    perspective: bool,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The canvas through a matrix (canvas pixel to output pixel), bilinear, grey around it."""
    if perspective:
        return np.asarray(cv2.warpPerspective(canvas, matrix_33, out_wh, dst=out, borderValue=(PADDING,) * 4))
    return np.asarray(cv2.warpAffine(canvas, matrix_33[:2], out_wh, dst=out, borderValue=(PADDING,) * 4))
