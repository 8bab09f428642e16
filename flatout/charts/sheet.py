"""A white sheet to draw charts on. Everything is drawn larger and shrunk at the end: smooth lines and letters.

Coordinates and sizes are in points, x to the right, y down; a point is two pixels of the finished picture.
"""

import colorsys
import os
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import cv2
import numpy as np

# One colour per class, the same in every picture of a run. BGR, as OpenCV wants them.

Colour = tuple[int, int, int]

INK: Colour = (51, 41, 36)
"""Text and axes: not quite black."""
FAINT: Colour = (232, 228, 224)
"""Grids."""
MUTED: Colour = (140, 130, 122)
"""What should be there without being looked at first."""
PAPER: Colour = (255, 255, 255)
ACCENT: Colour = (166, 84, 20)
"""The one curve that counts."""
WARM: Colour = (40, 112, 224)
"""What stands against the accent."""

_GOLDEN = 0.61803398875
_SHADES = ((0.78, 0.95), (0.60, 0.86), (0.88, 0.74))
"""Saturation and value; neighbours differ in these as well."""


def colour_of(number: int) -> Colour:
    """The colour of a class; neighbours lie far apart on the colour circle."""
    saturation, value = _SHADES[number % len(_SHADES)]
    red, green, blue = colorsys.hsv_to_rgb((0.02 + number * _GOLDEN) % 1, saturation, value)
    return round(255 * blue), round(255 * green), round(255 * red)


def ink_on(colour: Colour) -> Colour:
    """Black or white, whichever can be read on a colour."""
    blue, green, red = colour
    return (0, 0, 0) if 0.114 * blue + 0.587 * green + 0.299 * red > 140 else (255, 255, 255)


# Text in pictures, with OpenCV's own letters, which are ASCII.

FONT = cv2.FONT_HERSHEY_SIMPLEX
_UNIT_PX = 21
"""Height of a capital letter at scale 1."""


def plain(text: str) -> str:
    """ASCII: accents are dropped, anything else becomes a question mark."""
    letters = (letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return "".join(letters).encode("ascii", "replace").decode()


def measure(text: str, height_px: float, weight: int = 1) -> tuple[int, int]:
    """Width and height of the capitals of a text whose capitals are `height_px` high."""
    (width, height), _ = cv2.getTextSize(plain(text), FONT, height_px / _UNIT_PX, weight)
    return width, height


def write(
    image: np.ndarray, text: str, left: int, baseline: int, height_px: float, colour: Colour, weight: int = 1
) -> None:
    """Letters of a given height and line width, in place."""
    cv2.putText(image, plain(text), (left, baseline), FONT, height_px / _UNIT_PX, colour, weight, cv2.LINE_AA)


def shortened(text: str, most: int) -> str:
    """At most so many letters; the end goes."""
    return text if len(text) <= most else f"{text[: most - 2].rstrip()}.."


def shortened_file(name: str, most: int) -> str:
    """At most so many letters; the beginning goes, because numbers stand at the end."""
    return name if len(name) <= most else f"..{name[len(name) - most + 2 :]}"


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


# A picture to a file, whole or not at all.

JPEG_QUALITY = 92


def write_picture(path: Path, image_HWC: np.ndarray) -> Path:
    """uint8 [H, W, 3], BGR; the name's ending says the format. OSError where nothing can be written."""
    options = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY] if path.suffix in (".jpg", ".jpeg") else []
    content = cv2.imencode(path.suffix, image_HWC, options)[1].tobytes()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(content)
        except OSError:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path
