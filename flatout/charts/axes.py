"""A pair of axes on a sheet: a frame, a grid, numbers at the ticks, and what is drawn in it in its own numbers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flatout.charts.sheet import FAINT, INK, MUTED, Colour, Sheet

TICK_PX = 7.5
LABEL_PX = 8.5
TITLE_PX = 10


class Place(NamedTuple):
    """Where the frame lies on the sheet, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


class Axes:
    """Draws in data numbers. What leaves the frame is cut to its border.

    Limits are given as (left, right) and (bottom, top), either way round.
    """

    def __init__(
        self,
        sheet: Sheet,
        place: Place,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        title: str = "",
        x_label: str = "",
        y_label: str = "",
        whole_x: bool = False,
        x_ticks: bool = True,
    ) -> None:
        """`whole_x`: only whole numbers are written below it, as for epochs; without `x_ticks`, none."""
        self.sheet, self.place = sheet, place
        self._x, self._y = _widened(x), _widened(y)
        if x_ticks:
            self._draw_columns(whole_x)
        self._draw_rows()
        if title:
            middle = (place.left + place.right) / 2
            sheet.text(title, middle, place.top - 9, px=TITLE_PX, anchor="middle", bold=True)
        if x_label:
            below = place.bottom + 33
            sheet.text(x_label, (place.left + place.right) / 2, below, px=LABEL_PX, anchor="middle")
        if y_label:
            sheet.rising_text(y_label, place.left - 38, (place.top + place.bottom) / 2, px=LABEL_PX)

    def curve(self, x_n: np.ndarray, y_n: np.ndarray, colour: Colour, width: float = 1.4) -> None:
        """A line through points; those that are no numbers leave a gap."""
        keep = np.isfinite(x_n) & np.isfinite(y_n)
        for run in np.split(np.arange(len(x_n)), np.flatnonzero(~keep)):
            inside = run[keep[run]]
            if len(inside) > 1:
                self.sheet.line(self.to_px(x_n[inside], y_n[inside]), colour, width)

    def dots(self, x_n: np.ndarray, y_n: np.ndarray, colour: Colour, radius: float = 2) -> None:
        keep = np.isfinite(x_n) & np.isfinite(y_n)
        for x, y in self.to_px(x_n[keep], y_n[keep]).tolist():
            self.sheet.dot(x, y, radius, colour)

    def bar(self, low: float, high: float, value: float, colour: Colour) -> None:
        """A column from 0 to `value`."""
        (left, top), (right, bottom) = self.to_px(np.array([low, high]), np.array([value, 0.0])).tolist()
        self.sheet.block(left, top, right, bottom, colour)

    def to_px(self, x_n: np.ndarray, y_n: np.ndarray) -> np.ndarray:
        """[n, 2] on the sheet."""
        place = self.place
        across = np.clip((np.asarray(x_n) - self._x[0]) / (self._x[1] - self._x[0]), 0, 1)
        up = np.clip((np.asarray(y_n) - self._y[0]) / (self._y[1] - self._y[0]), 0, 1)
        columns = (
            place.left + across * (place.right - place.left),
            place.bottom - up * (place.bottom - place.top),
        )
        return np.stack(columns, 1)

    def close(self) -> None:
        """The two axis lines, over what was drawn."""
        place = self.place
        self.sheet.line([(place.left, place.top), (place.left, place.bottom), (place.right, place.bottom)], INK, 0.8)

    def _draw_columns(self, whole: bool) -> None:
        sheet, place = self.sheet, self.place
        for value, text in ticks(*self._x, most=max(2, int((place.right - place.left) / 42)), whole=whole):
            x = float(self.to_px(np.array([value]), np.array([self._y[0]]))[0, 0])
            sheet.line([(x, place.top), (x, place.bottom)], FAINT, 0.7)
            sheet.text(text, x, place.bottom + 15, px=TICK_PX, colour=MUTED, anchor="middle")

    def _draw_rows(self) -> None:
        sheet, place = self.sheet, self.place
        for value, text in ticks(*self._y, most=max(2, int((place.bottom - place.top) / 36))):
            y = float(self.to_px(np.array([self._x[0]]), np.array([value]))[0, 1])
            sheet.line([(place.left, y), (place.right, y)], FAINT, 0.7)
            sheet.text(text, place.left - 6, y + TICK_PX / 2, px=TICK_PX, colour=MUTED, anchor="right")


def ticks(low: float, high: float, *, most: int, whole: bool = False) -> list[tuple[float, str]]:
    """About so many round numbers from low to high, and how they are written."""
    low, high = min(low, high), max(low, high)
    raw = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    # A quarter of ten is no whole number; a quarter of a hundred is.
    factors = (1, 2, 5, 10) if whole and power < 10 else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= raw * (1 - 1e-9))
    values = np.arange(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1) * step
    return list(zip(values.tolist(), written(values, step), strict=True))


def written(values: Sequence[float] | np.ndarray, step: float) -> list[str]:
    """Numbers with as many decimals as their step needs; thousands and millions as 10k and 2M."""
    largest = max(map(abs, values), default=0)
    for size, unit in ((1e6, "M"), (1e4, "k")):
        if largest >= size:
            return [f"{value / (size if unit == 'M' else 1e3):g}{unit}" if value else "0" for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if not math.isclose(round(step, decimals), step, rel_tol=1e-9):
        decimals += 1
    return [f"{value:.{decimals}f}" for value in values]


def _widened(limits: tuple[float, float]) -> tuple[float, float]:
    """Limits that have a distance."""
    low, high = limits
    return (low, high) if high != low else (low - 0.5 - abs(low) * 0.1, high + 0.5 + abs(high) * 0.1)
