"""A white canvas to plot on, axes on it, and the colours and letters of all charts.

Everything is plotted larger and shrunk at the end, for smooth lines and letters. Coordinates and sizes are in points, x
to the right, y down; a point is two pixels of the finished image. `Axes` plot in data coordinates inside a frame, with
a grid and numbers at the ticks.

Dimension key:  n points   H W C rows, columns and channels (BGR) of an image
"""

import colorsys
import math
import os
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import cv2
import numpy as np

# Colours: one per class, the same in every plot of a run. BGR, as in OpenCV.

Colour = tuple[int, int, int]

INK: Colour = (51, 41, 36)
"""Text and axes: not quite black."""
FAINT: Colour = (232, 228, 224)
"""Grids."""
MUTED: Colour = (140, 130, 122)
"""Less important text and points."""
PAPER: Colour = (255, 255, 255)
"""Background."""
ACCENT: Colour = (166, 84, 20)
"""The most important curve."""
WARM: Colour = (40, 112, 224)
"""Contrast to the accent."""

_GOLDEN = 0.61803398875
_SHADES = ((0.78, 0.95), (0.60, 0.86), (0.88, 0.74))
"""Saturation and value of classes in turn; neighbours differ in these as well as in hue."""


def colour_of(number: int) -> Colour:
    """Colour of a class, by its number; neighbours are far apart on the colour circle."""
    saturation, value = _SHADES[number % len(_SHADES)]
    red, green, blue = colorsys.hsv_to_rgb((0.02 + number * _GOLDEN) % 1, saturation, value)
    return round(255 * blue), round(255 * green), round(255 * red)


def ink_on(colour: Colour) -> Colour:
    """Black or white, whichever is readable on a colour."""
    blue, green, red = colour
    return (0, 0, 0) if 0.114 * blue + 0.587 * green + 0.299 * red > 140 else (255, 255, 255)


# Text, in OpenCV's own font, which is ASCII only

FONT = cv2.FONT_HERSHEY_SIMPLEX
_UNIT_PX = 21
"""Height of a capital letter at scale 1."""


def plain(text: str) -> str:
    """The text in ASCII: accents are dropped, other characters become question marks."""
    letters = (letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return "".join(letters).encode("ascii", "replace").decode()


def measure(text: str, height_px: float, weight: int = 1) -> tuple[int, int]:
    """Width and height in pixels of a text whose capitals are `height_px` high."""
    (width, height), _ = cv2.getTextSize(plain(text), FONT, height_px / _UNIT_PX, weight)
    return width, height


def write(
    image: np.ndarray, text: str, left: int, baseline: int, height_px: float, colour: Colour, weight: int = 1
) -> None:
    """Write text into an image, in place; `weight` is the stroke width in pixels."""
    cv2.putText(image, plain(text), (left, baseline), FONT, height_px / _UNIT_PX, colour, weight, cv2.LINE_AA)


def shortened(text: str, most: int) -> str:
    """The text, cut at the end to at most `most` letters."""
    return text if len(text) <= most else f"{text[: most - 2].rstrip()}.."


def shortened_file(name: str, most: int) -> str:
    """A file name, cut at the beginning to at most `most` letters: its number is usually at the end."""
    return name if len(name) <= most else f"..{name[len(name) - most + 2 :]}"


# Canvas

PIXELS = 2
"""Pixels per point in the finished image."""
ZOOM = 4
"""Pixels per point while plotting."""

Anchor = Literal["left", "middle", "right"]


class Canvas:
    """A white area to draw on; `render()` gives the finished image. Coordinates are in points."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._pixels = np.full((height * ZOOM, width * ZOOM, 3), PAPER, np.uint8)

    def render(self) -> np.ndarray:
        """The finished image, uint8 [H, W, 3], BGR."""
        size_wh = (self.width * PIXELS, self.height * PIXELS)
        return np.asarray(cv2.resize(self._pixels, size_wh, interpolation=cv2.INTER_AREA))

    def line(self, points: Sequence[tuple[float, float]] | np.ndarray, colour: Colour, width: float = 1) -> None:
        """A line through points [n, 2]."""
        fixed = (np.asarray(points, np.float64).reshape(-1, 1, 2) * ZOOM * 16).round().astype(np.int32)
        thick = max(1, round(width * ZOOM))
        cv2.polylines(self._pixels, [fixed], False, colour, thick, cv2.LINE_AA, shift=4)

    def filled_rectangle(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        """A filled rectangle."""
        x1, y1, x2, y2 = (round(side * ZOOM) for side in (left, top, right, bottom))
        self._pixels[max(0, y1) : max(0, y2), max(0, x1) : max(0, x2)] = colour

    def rectangle(self, left: float, top: float, right: float, bottom: float, colour: Colour, width: float = 1) -> None:
        """The outline of a rectangle."""
        corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
        self.line(corners, colour, width)

    def dot(self, x: float, y: float, radius: float, colour: Colour) -> None:
        centre = round(x * ZOOM * 16), round(y * ZOOM * 16)
        cv2.circle(self._pixels, centre, round(radius * ZOOM * 16), colour, cv2.FILLED, cv2.LINE_AA, shift=4)

    def image(self, image_HWC: np.ndarray, left: float, top: float, width: float, height: float) -> None:
        """An image, scaled without smoothing, so that cells of a map stay sharp."""
        x, y, w, h = (round(value * ZOOM) for value in (left, top, width, height))
        self._pixels[y : y + h, x : x + w] = cv2.resize(image_HWC, (w, h), interpolation=cv2.INTER_NEAREST)

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
        """A line of text whose capitals are `px` points high; `anchor` tells which point of it is at x."""
        weight = self._weight(px, bold)
        left = x * ZOOM - {"left": 0.0, "middle": 0.5, "right": 1.0}[anchor] * measure(text, px * ZOOM, weight)[0]
        write(self._pixels, text, round(left), round(baseline * ZOOM), px * ZOOM, colour, weight)

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
        """A line of text that reads upwards; its baseline is at x, and `anchor` tells which point of it is at y."""
        weight = self._weight(px, bold)
        length, height = measure(text, px * ZOOM, weight)
        pad = round(px * ZOOM)
        strip = np.full((height + 2 * pad, length + 2 * pad, 3), PAPER, np.uint8)
        write(strip, text, pad, height + pad, px * ZOOM, colour, weight)
        rotated = cv2.rotate(strip, cv2.ROTATE_90_COUNTERCLOCKWISE)
        left = round(x * ZOOM) - height - pad
        below = {"left": 1.0, "middle": 0.5, "right": 0.0}[anchor]
        top = round(y * ZOOM) - round(below * length) - pad
        x0, y0 = max(0, left), max(0, top)
        area = self._pixels[y0 : top + rotated.shape[0], x0 : left + rotated.shape[1]]
        np.minimum(area, rotated[y0 - top : y0 - top + area.shape[0], x0 - left : x0 - left + area.shape[1]], out=area)

    def text_width(self, text: str, px: float = 8, *, bold: bool = False) -> float:
        """Width of a line of text, in points."""
        return measure(text, px * ZOOM, self._weight(px, bold))[0] / ZOOM

    @staticmethod
    def _weight(px: float, bold: bool) -> int:
        return max(1, round(px * ZOOM * (0.14 if bold else 0.1)))


# Files

JPEG_QUALITY = 92


def write_image(path: Path, image_HWC: np.ndarray) -> Path:
    """Write an image (uint8 [H, W, 3], BGR) completely or not at all; returns `path`.

    The suffix of the name determines the format. OSError if it cannot be written.
    """
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


# Axes

TICK_PX = 7.5
LABEL_PX = 8.5
TITLE_PX = 10


class Frame(NamedTuple):
    """Position of a pair of axes on a canvas, in points."""

    left: float
    top: float
    right: float
    bottom: float


class Axes:
    """A pair of axes in a frame of a canvas; plots in data coordinates. Points outside are moved to the border.

    Limits are given as (left, right) and (bottom, top), in either order.
    """

    def __init__(
        self,
        canvas: Canvas,
        frame: Frame,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        title: str = "",
        x_label: str = "",
        y_label: str = "",
        whole_x: bool = False,
        x_ticks: bool = True,
    ) -> None:
        """`whole_x`: only integers at the x ticks, as for epochs; without `x_ticks`, no x ticks."""
        self.canvas, self.frame = canvas, frame
        self._x, self._y = _widened(x), _widened(y)
        if x_ticks:
            self._plot_columns(whole_x)
        self._plot_rows()
        middle = (frame.left + frame.right) / 2
        if title:
            canvas.text(title, middle, frame.top - 9, px=TITLE_PX, anchor="middle", bold=True)
        if x_label:
            canvas.text(x_label, middle, frame.bottom + 33, px=LABEL_PX, anchor="middle")
        if y_label:
            canvas.rising_text(y_label, frame.left - 38, (frame.top + frame.bottom) / 2, px=LABEL_PX)

    def curve(self, x_n: np.ndarray, y_n: np.ndarray, colour: Colour, width: float = 1.4) -> None:
        """A line through points [n]; NaN leaves a gap."""
        keep = np.isfinite(x_n) & np.isfinite(y_n)
        for run in np.split(np.arange(len(x_n)), np.flatnonzero(~keep)):
            inside = run[keep[run]]
            if len(inside) > 1:
                self.canvas.line(self.to_px(x_n[inside], y_n[inside]), colour, width)

    def dots(self, x_n: np.ndarray, y_n: np.ndarray, colour: Colour, radius: float = 2) -> None:
        keep = np.isfinite(x_n) & np.isfinite(y_n)
        for x, y in self.to_px(x_n[keep], y_n[keep]).tolist():
            self.canvas.dot(x, y, radius, colour)

    def bar(self, low: float, high: float, value: float, colour: Colour) -> None:
        """A bar from 0 to `value`, between `low` and `high` on the x axis."""
        (left, top), (right, bottom) = self.to_px(np.array([low, high]), np.array([value, 0.0])).tolist()
        self.canvas.filled_rectangle(left, top, right, bottom, colour)

    def to_px(self, x_n: np.ndarray, y_n: np.ndarray) -> np.ndarray:
        """Positions on the canvas, [n, 2] in points."""
        frame = self.frame
        across = np.clip((np.asarray(x_n) - self._x[0]) / (self._x[1] - self._x[0]), 0, 1)
        up = np.clip((np.asarray(y_n) - self._y[0]) / (self._y[1] - self._y[0]), 0, 1)
        columns = (
            frame.left + across * (frame.right - frame.left),
            frame.bottom - up * (frame.bottom - frame.top),
        )
        return np.stack(columns, 1)

    def close(self) -> None:
        """Draw the two axis lines on top of everything plotted."""
        frame = self.frame
        self.canvas.line([(frame.left, frame.top), (frame.left, frame.bottom), (frame.right, frame.bottom)], INK, 0.8)

    def _plot_columns(self, whole: bool) -> None:
        canvas, frame = self.canvas, self.frame
        for value, text in ticks(*self._x, most=max(2, int((frame.right - frame.left) / 42)), whole=whole):
            x = float(self.to_px(np.array([value]), np.array([self._y[0]]))[0, 0])
            canvas.line([(x, frame.top), (x, frame.bottom)], FAINT, 0.7)
            canvas.text(text, x, frame.bottom + 15, px=TICK_PX, colour=MUTED, anchor="middle")

    def _plot_rows(self) -> None:
        canvas, frame = self.canvas, self.frame
        for value, text in ticks(*self._y, most=max(2, int((frame.bottom - frame.top) / 36))):
            y = float(self.to_px(np.array([self._x[0]]), np.array([value]))[0, 1])
            canvas.line([(frame.left, y), (frame.right, y)], FAINT, 0.7)
            canvas.text(text, frame.left - 6, y + TICK_PX / 2, px=TICK_PX, colour=MUTED, anchor="right")


def ticks(low: float, high: float, *, most: int, whole: bool = False) -> list[tuple[float, str]]:
    """Round numbers from low to high, about `most` of them, with their labels."""
    low, high = min(low, high), max(low, high)
    raw = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    # A quarter of 10 is not an integer; a quarter of 100 is.
    factors = (1, 2, 5, 10) if whole and power < 10 else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= raw * (1 - 1e-9))
    values = np.arange(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1) * step
    return list(zip(values.tolist(), written(values, step), strict=True))


def written(values: Sequence[float] | np.ndarray, step: float) -> list[str]:
    """Labels of numbers, with as many decimals as their step needs; thousands and millions as 10k and 2M."""
    largest = max(map(abs, values), default=0)
    for size, unit in ((1e6, "M"), (1e4, "k")):
        if largest >= size:
            return [f"{value / (size if unit == 'M' else 1e3):g}{unit}" if value else "0" for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if not math.isclose(round(step, decimals), step, rel_tol=1e-9):
        decimals += 1
    return [f"{value:.{decimals}f}" for value in values]


def _widened(limits: tuple[float, float]) -> tuple[float, float]:
    """The limits, moved apart if they are equal."""
    low, high = limits
    return (low, high) if high != low else (low - 0.5 - abs(low) * 0.1, high + 0.5 + abs(high) * 0.1)
