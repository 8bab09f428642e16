"""results.png: losses and scores over the epochs, from results.txt or results.csv.

Dimension key:  E epochs in the file
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.charts.canvas import ACCENT, MUTED, WARM, Axes, Canvas, Frame, write_image
from flatout.errors import DataError

NUM_COLUMNS = 15
MIN_LOSS = 1e-12
"""Smaller losses are plotted as this, on their logarithmic scale."""


class Panel(NamedTuple):
    """A panel of the plot of results.txt."""

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
"""Two rows of five; `column` is the column of results.txt."""
WIDTH, HEIGHT = 196, 176
LEFT, TOP = 56, 40
GAP_W, GAP_H = 56, 66


class Curve(NamedTuple):
    """Values of a loss or a score over the epochs."""

    title: str
    value_E: np.ndarray
    """NaN where not measured."""
    is_loss: bool


def plot_results(results_txt: Path, file: Path | None = None, *, marks: Sequence[float] = ()) -> Path:
    """Plot a results.txt, by default to results.png next to it. DataError if it contains no epoch.

    `marks` are epochs with a vertical line, such as the beginnings of stages.
    """
    table = read_results(results_txt)
    # YOLOv7 writes 0 for a loss that was not measured.
    curves = [
        Curve(title, np.where(is_loss & (table[:, column] == 0), np.nan, table[:, column]), is_loss)
        for title, column, is_loss in PANELS
    ]
    return plot_epochs(table[:, 0], curves, file or results_txt.with_name("results.png"), marks=marks)


def plot_columns(results_csv: Path, names: Sequence[str], file: Path) -> Path | None:
    """Plot the columns `names` of a results.csv that have values, "loss" as logarithms; None if none has any yet."""
    with results_csv.open(newline="") as opened:
        rows = [row for row in csv.DictReader(opened) if row["epoch"] and not row["epoch"].startswith("#")]
    curves = []
    for name in names:
        value_E = np.array([float(row.get(name) or "nan") for row in rows])
        if np.isfinite(value_E).any():
            is_loss = name == "loss"
            shown_E = np.log10(np.maximum(value_E, MIN_LOSS)) if is_loss else value_E
            curves.append(Curve(f"{name} (log10)" if is_loss else name, shown_E, is_loss))
    return plot_epochs(np.array([float(row["epoch"]) for row in rows]), curves, file) if curves else None


def plot_epochs(epoch_E: np.ndarray, curves: Sequence[Curve], file: Path, *, marks: Sequence[float] = ()) -> Path:
    """Plot a panel for every curve, five in a row; returns `file`."""
    columns, rows = min(5, len(curves)), -(-len(curves) // 5)
    canvas = Canvas(LEFT + columns * WIDTH + (columns - 1) * GAP_W + 24, TOP + rows * HEIGHT + (rows - 1) * GAP_H + 46)
    for number, curve in enumerate(curves):
        left, top = LEFT + number % columns * (WIDTH + GAP_W), TOP + number // columns * (HEIGHT + GAP_H)
        frame = Frame(left, top, left + WIDTH, top + HEIGHT)
        _plot_panel(canvas, frame, curve, epoch_E, marks, last_row=number // columns == rows - 1)
    return write_image(file, canvas.render())


def read_results(path: Path) -> np.ndarray:
    """The table as float64 [E, 15]: epoch, memory in GB, then the other columns.

    Incomplete lines are left out; DataError if there is no complete one.
    """
    rows = [row for line in path.read_text().splitlines() if (row := _numbers(line.split()))]
    if not rows:
        raise DataError(
            f"{path} has no line with {NUM_COLUMNS} columns, so there is nothing to plot. Give the results.txt of a "
            "training."
        )
    return np.array(rows)


def _numbers(words: Sequence[str]) -> list[float] | None:
    if len(words) < NUM_COLUMNS:
        return None
    try:
        return [float(words[0].partition("/")[0]), float(words[1].rstrip("G")), *map(float, words[2:NUM_COLUMNS])]
    except ValueError:
        return None


def _plot_panel(
    canvas: Canvas,
    frame: Frame,
    curve: Curve,
    epoch_E: np.ndarray,
    marks: Sequence[float],
    *,
    last_row: bool,
) -> None:
    known = curve.value_E[np.isfinite(curve.value_E)]
    axes = Axes(
        canvas,
        frame,
        x=(float(epoch_E.min()), float(epoch_E.max())),
        y=_limits(known, curve.is_loss),
        title=curve.title,
        x_label="epoch" if last_row else "",
        whole_x=True,
    )
    for (x, _), *_ in (axes.to_px(np.array([mark]), np.zeros(1)).tolist() for mark in marks):
        canvas.line([(x, frame.top), (x, frame.bottom)], MUTED, 0.9)
    colour = WARM if curve.is_loss else ACCENT
    axes.curve(epoch_E, curve.value_E, colour, 1.8)
    if len(epoch_E) <= 40:
        axes.dots(epoch_E, curve.value_E, colour, 2.2)
    axes.close()
    if not len(known):
        middle = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
        canvas.text("not measured", *middle, px=8, anchor="middle")


def _limits(known: np.ndarray, is_loss: bool) -> tuple[float, float]:
    """Limits of the y axis: from 0 for scores of at most 1, else around the values."""
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    margin = 0.06 * (high - low)
    return (low - margin, high + margin) if is_loss or high > 1 else (0.0, max(high * 1.06, 0.01))
