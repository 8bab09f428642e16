"""A white sheet to draw charts on. Everything is drawn larger and shrunk at the end: smooth lines and letters.

Coordinates and sizes are in points, x to the right, y down; a point is two pixels of the finished picture.
"""

from collections.abc import Sequence
from typing import Literal

import cv2
import numpy as np

from flatout.yolo.pictures.lettering import measure, write
from flatout.yolo.pictures.palette import INK, PAPER, Colour

PIXELS = 2
"""Per point, in the finished picture."""
ZOOM = 4
"""Pixels per point while drawing."""

Anchor = Literal["left", "middle", "right"]


class Sheet:
    """Draw on it, then take `picture()`."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._canvas = np.full((height * ZOOM, width * ZOOM, 3), PAPER, np.uint8)

    def picture(self) -> np.ndarray:
        """uint8 [H, W, 3], BGR."""
        size_wh = (self.width * PIXELS, self.height * PIXELS)
        return np.asarray(cv2.resize(self._canvas, size_wh, interpolation=cv2.INTER_AREA))

    def line(self, points: Sequence[tuple[float, float]] | np.ndarray, colour: Colour, width: float = 1) -> None:
        """A line through points [n, 2]."""
        fixed = (np.asarray(points, np.float64).reshape(-1, 1, 2) * ZOOM * 16).round().astype(np.int32)
        thick = max(1, round(width * ZOOM))
        cv2.polylines(self._canvas, [fixed], False, colour, thick, cv2.LINE_AA, shift=4)

    def block(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        """A filled rectangle."""
        x1, y1, x2, y2 = (round(side * ZOOM) for side in (left, top, right, bottom))
        self._canvas[max(0, y1) : max(0, y2), max(0, x1) : max(0, x2)] = colour

    def frame(self, left: float, top: float, right: float, bottom: float, colour: Colour, width: float = 1) -> None:
        """The outline of a rectangle."""
        corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
        self.line(corners, colour, width)

    def dot(self, x: float, y: float, radius: float, colour: Colour) -> None:
        centre = round(x * ZOOM * 16), round(y * ZOOM * 16)
        cv2.circle(self._canvas, centre, round(radius * ZOOM * 16), colour, cv2.FILLED, cv2.LINE_AA, shift=4)

    def image(self, picture_HWC: np.ndarray, left: float, top: float, width: float, height: float) -> None:
        """A picture, stretched without smoothing: maps of cells stay maps of cells."""
        x, y, w, h = (round(value * ZOOM) for value in (left, top, width, height))
        self._canvas[y : y + h, x : x + w] = cv2.resize(picture_HWC, (w, h), interpolation=cv2.INTER_NEAREST)

    def text(
        self,
        text: str,
        x: float,
        baseline: float,
        *,
        px: float = 8,
        colour: Colour = INK,
        anchor: Anchor = "left",
        bold: bool = False,
    ) -> None:
        """A line of text whose capitals are `px` high; `anchor` says which point of it is at x."""
        weight = self._weight(px, bold)
        left = x * ZOOM - {"left": 0.0, "middle": 0.5, "right": 1.0}[anchor] * measure(text, px * ZOOM, weight)[0]
        write(self._canvas, text, round(left), round(baseline * ZOOM), px * ZOOM, colour, weight)

    def rising_text(
        self,
        text: str,
        x: float,
        y: float,
        *,
        px: float = 8,
        colour: Colour = INK,
        anchor: Anchor = "middle",
        bold: bool = False,
    ) -> None:
        """A line of text that reads upwards; its baseline is at x, and `anchor` says which point of it is at y."""
        weight = self._weight(px, bold)
        length, height = measure(text, px * ZOOM, weight)
        pad = round(px * ZOOM)
        strip = np.full((height + 2 * pad, length + 2 * pad, 3), PAPER, np.uint8)
        write(strip, text, pad, height + pad, px * ZOOM, colour, weight)
        turned = cv2.rotate(strip, cv2.ROTATE_90_COUNTERCLOCKWISE)
        left = round(x * ZOOM) - height - pad
        below = {"left": 1.0, "middle": 0.5, "right": 0.0}[anchor]
        top = round(y * ZOOM) - round(below * length) - pad
        x0, y0 = max(0, left), max(0, top)
        room = self._canvas[y0 : top + turned.shape[0], x0 : left + turned.shape[1]]
        np.minimum(room, turned[y0 - top : y0 - top + room.shape[0], x0 - left : x0 - left + room.shape[1]], out=room)

    def text_width(self, text: str, px: float = 8, *, bold: bool = False) -> float:
        return measure(text, px * ZOOM, self._weight(px, bold))[0] / ZOOM

    @staticmethod
    def _weight(px: float, bold: bool) -> int:
        return max(1, round(px * ZOOM * (0.14 if bold else 0.1)))
