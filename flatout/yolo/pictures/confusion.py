"""The confusion matrix as a picture: columns are what is true, rows are what was said.

Dimension key:  C classes
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.yolo.pictures.boxes import name_of
from flatout.yolo.pictures.lettering import shortened
from flatout.yolo.pictures.palette import FAINT, INK, MUTED, Colour, ink_on
from flatout.yolo.pictures.picture_file import write_picture
from flatout.yolo.pictures.sheet import Sheet

FEW_NUMBERS = 30
"""With fewer classes every cell has its number written in it."""
MOST_NAMES = 99
DARK: Colour = (122, 54, 8)
LIGHT: Colour = (255, 251, 247)


def draw_confusion(counts: np.ndarray, names: Sequence[str], path: Path) -> Path:
    """Counts int64 [C + 1, C + 1] as `ConfusionMatrix` has them; drawn as shares of each true class."""
    shares = column_shares(as_shown(counts))
    side = len(shares)
    cell = max(9.0, min(56.0, 760 / side))
    letters = min(8.5, max(4.5, cell * 0.55))
    labels = [shortened(name_of(number, names), 22) for number in range(side - 1)] + ["background"]
    longest = max(Sheet(1, 1).text_width(text, letters) for text in labels)
    left, top, width = 44 + longest, 44.0, side * cell
    sheet = Sheet(round(left + width + 84), round(top + width + longest + 46))
    sheet.text("Confusion matrix", left + width / 2, 24, px=10, anchor="middle", bold=True)
    _draw_cells(sheet, shares, left, top, cell)
    if side <= MOST_NAMES:
        _draw_names(sheet, labels, left, top, cell, letters)
    sheet.text("True", left + width / 2, top + width + longest + 32, px=9, anchor="middle", bold=True)
    sheet.rising_text("Predicted", 20, top + width / 2, px=9, bold=True)
    _draw_scale(sheet, left + width + 24, top, min(300.0, width))
    return write_picture(path, sheet.picture())


def as_shown(counts: np.ndarray) -> np.ndarray:
    """The same counts with one rule for all cells: row = predicted, column = true.

    YOLOv7 counts what was found at [true, predicted], but what was missed and what was made up the other way round,
    and draws all of it as if the row were the prediction. Here the picture is right.
    """
    shown = counts.copy()
    shown[:-1, :-1] = counts[:-1, :-1].T
    return shown


def column_shares(confusion: np.ndarray) -> np.ndarray:
    """Each column of a confusion matrix divided by its sum; shares below 0.005 are blank (not a number)."""
    shares = confusion / (confusion.sum(0, keepdims=True) + 1e-6)
    shares[shares < 0.005] = np.nan
    return np.asarray(shares)


def shade(share: float) -> Colour:
    """From light to dark, by a share of 0 to 1."""
    low, high = np.array(LIGHT, float), np.array(DARK, float)
    blue, green, red = (low + (high - low) * min(1.0, share) ** 0.8).round().astype(int).tolist()
    return blue, green, red


def _draw_cells(sheet: Sheet, shares: np.ndarray, left: float, top: float, cell: float) -> None:
    side = len(shares)
    for row, column in np.argwhere(~np.isnan(shares)).tolist():
        x, y, share = left + column * cell, top + row * cell, float(shares[row, column])
        colour = shade(share)
        sheet.block(x, y, x + cell, y + cell, colour)
        if side <= FEW_NUMBERS:
            px = min(8.5, cell * 0.24)
            sheet.text(
                f"{share:.2f}", x + cell / 2, y + cell / 2 + px / 2, px=px, colour=ink_on(colour), anchor="middle"
            )
    for place in range(1, side):
        sheet.line([(left + place * cell, top), (left + place * cell, top + side * cell)], FAINT, 0.5)
        sheet.line([(left, top + place * cell), (left + side * cell, top + place * cell)], FAINT, 0.5)
    sheet.frame(left, top, left + side * cell, top + side * cell, INK, 0.8)


def _draw_names(sheet: Sheet, labels: Sequence[str], left: float, top: float, cell: float, px: float) -> None:
    bottom = top + len(labels) * cell
    for place, text in enumerate(labels):
        middle = (place + 0.5) * cell
        colour = MUTED if place == len(labels) - 1 else INK
        sheet.text(text, left - 8, top + middle + px / 2, px=px, colour=colour, anchor="right")
        sheet.rising_text(text, left + middle + px / 2, bottom + 8, px=px, colour=colour, anchor="right")


def _draw_scale(sheet: Sheet, left: float, top: float, height: float) -> None:
    """What the shades mean."""
    column = np.array([[shade(1 - step / 255)] for step in range(256)], np.uint8)
    sheet.image(column, left, top, 14, height)
    sheet.frame(left, top, left + 14, top + height, INK, 0.6)
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        sheet.text(f"{share:.1f}", left + 20, top + (1 - share) * height + 4, px=7.5, colour=MUTED)
