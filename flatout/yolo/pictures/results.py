"""results.png: how losses and scores went over the epochs, from results.txt.

Dimension key:  E epochs that have a line
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import DataError
from flatout.yolo.pictures.axes import Axes, Place
from flatout.yolo.pictures.palette import ACCENT, MUTED, WARM
from flatout.yolo.pictures.picture_file import write_picture
from flatout.yolo.pictures.sheet import Sheet

NUM_COLUMNS = 15


class Panel(NamedTuple):
    """What a panel shows."""

    title: str
    column: int
    is_loss: bool


PANELS = (
    Panel("Box", 2, True),
    Panel("Objectness", 3, True),
    Panel("Classification", 4, True),
    Panel("Precision", 8, False),
    Panel("Recall", 9, False),
    Panel("val Box", 12, True),
    Panel("val Objectness", 13, True),
    Panel("val Classification", 14, True),
    Panel("mAP@0.5", 10, False),
    Panel("mAP@0.5:0.95", 11, False),
)
"""Two rows of five; `column` is that of results.txt."""
WIDTH, HEIGHT = 196, 176
LEFT, TOP = 56, 40
GAP_W, GAP_H = 56, 66


def results_png(results_txt: Path, file: Path | None = None, *, marks: Sequence[float] = ()) -> Path:
    """Draw a results.txt, by default into results.png beside it; DataError if it holds no epoch.

    `marks` are epochs at which a line is drawn from top to bottom: where something else begins.
    """
    table = read_results(results_txt)
    columns, rows = 5, -(-len(PANELS) // 5)
    sheet = Sheet(LEFT + columns * WIDTH + (columns - 1) * GAP_W + 24, TOP + rows * HEIGHT + (rows - 1) * GAP_H + 46)
    for number, panel in enumerate(PANELS):
        left, top = LEFT + number % columns * (WIDTH + GAP_W), TOP + number // columns * (HEIGHT + GAP_H)
        place = Place(left, top, left + WIDTH, top + HEIGHT)
        _draw_panel(sheet, place, panel, table[:, 0], table[:, panel.column], marks, last_row=number >= columns)
    return write_picture(file or results_txt.with_name("results.png"), sheet.picture())


def read_results(path: Path) -> np.ndarray:
    """float64 [E, 15]: the epoch, memory in GB, then the other columns; a line that is not whole is left out."""
    rows = [row for line in path.read_text().splitlines() if (row := _numbers(line.split()))]
    if not rows:
        raise DataError(f"{path}: no line with {NUM_COLUMNS} columns, so there is nothing to draw.")
    return np.array(rows)


def _numbers(words: Sequence[str]) -> list[float] | None:
    if len(words) < NUM_COLUMNS:
        return None
    try:
        return [float(words[0].partition("/")[0]), float(words[1].rstrip("G")), *map(float, words[2:NUM_COLUMNS])]
    except ValueError:
        return None


def _draw_panel(
    sheet: Sheet,
    place: Place,
    panel: Panel,
    epoch_E: np.ndarray,
    value_E: np.ndarray,
    marks: Sequence[float],
    *,
    last_row: bool,
) -> None:
    # YOLOv7 writes 0 for a loss that was not measured.
    value_E = np.where(panel.is_loss & (value_E == 0), np.nan, value_E)
    known = value_E[np.isfinite(value_E)]
    axes = Axes(
        sheet,
        place,
        x=(float(epoch_E.min()), float(epoch_E.max())),
        y=_limits(known, panel.is_loss),
        title=panel.title,
        x_label="epoch" if last_row else "",
        whole_x=True,
    )
    for (x, _), *_ in (axes.to_px(np.array([mark]), np.zeros(1)).tolist() for mark in marks):
        sheet.line([(x, place.top), (x, place.bottom)], MUTED, 0.9)
    colour = WARM if panel.is_loss else ACCENT
    axes.curve(epoch_E, value_E, colour, 1.8)
    if len(epoch_E) <= 40:
        axes.dots(epoch_E, value_E, colour, 2.2)
    axes.close()
    if not len(known):
        middle = (place.left + place.right) / 2, (place.top + place.bottom) / 2
        sheet.text("not measured", *middle, px=8, anchor="middle")


def _limits(known: np.ndarray, is_loss: bool) -> tuple[float, float]:
    """Scores from 0; losses around what they were."""
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    margin = 0.06 * (high - low)
    return (low - margin, high + margin) if is_loss else (0.0, max(high * 1.06, 0.01))
