"""evolve.png: the fitness of every generation, over time and by hyper-parameter, from evolve.csv.

Dimension key:  N generations
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.charts.canvas import ACCENT, FAINT, MUTED, WARM, Axes, Canvas, Frame, write_image
from flatout.errors import DataError

COLUMNS = 7
WIDTH, HEIGHT = 150, 96
LEFT, TOP = 52, 40
GAP_W, GAP_H = 46, 50
WIDE = 220
"""Height of the panel of generations, which is as wide as all columns."""


def plot_evolution(table: Path, parameters: Sequence[str], file: Path | None = None) -> Path:
    """Plot an evolve.csv, by default to evolve.png next to it. DataError if it contains no generation.

    `parameters` are the names of the hyper-parameter columns.
    """
    columns = read_table(table)
    changed = [name for name in parameters if len(np.unique(columns[name])) > 1]
    unchanged = [name for name in parameters if name not in changed]
    rows = -(-len(changed) // COLUMNS)
    right = LEFT + COLUMNS * WIDTH + (COLUMNS - 1) * GAP_W
    canvas = Canvas(right + 24, TOP + WIDE + 58 + rows * (HEIGHT + GAP_H) + 30)
    _plot_generations(canvas, Frame(LEFT, TOP, right, TOP + WIDE), columns["generation"], columns["fitness"])
    for number, name in enumerate(changed):
        left = LEFT + number % COLUMNS * (WIDTH + GAP_W)
        top = TOP + WIDE + 66 + number // COLUMNS * (HEIGHT + GAP_H)
        frame = Frame(left, top, left + WIDTH, top + HEIGHT)
        _plot_parameter(canvas, frame, name, columns[name], columns["fitness"])
    if unchanged:
        canvas.text(f"unchanged: {', '.join(unchanged)}", LEFT, canvas.height - 12, px=7.5, colour=MUTED)
    return write_image(file or table.with_name("evolve.png"), canvas.render())


def read_table(path: Path) -> dict[str, np.ndarray]:
    """Columns by name, float64 [N]; DataError if there is no row."""
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    if not rows:
        raise DataError(f"{path} contains no generation, so there is nothing to plot. Train one first.")
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def _plot_generations(canvas: Canvas, frame: Frame, number_N: np.ndarray, fitness_N: np.ndarray) -> None:
    best = int(fitness_N.argmax())
    axes = Axes(
        canvas,
        frame,
        x=(0.0, float(max(1.0, number_N.max()))),
        y=_limits(fitness_N),
        title=f"Fitness by generation: {fitness_N[best]:.4f} in generation {best}",
        x_label="generation",
        whole_x=True,
    )
    axes.curve(number_N, np.maximum.accumulate(fitness_N), ACCENT, 1.6)
    axes.dots(number_N, fitness_N, MUTED, 2.6)
    axes.dots(number_N[[best]], fitness_N[[best]], WARM, 4.5)
    axes.close()


def _plot_parameter(canvas: Canvas, frame: Frame, name: str, value_N: np.ndarray, fitness_N: np.ndarray) -> None:
    best = int(fitness_N.argmax())
    margin = 0.06 * float(value_N.max() - value_N.min())
    limits = float(value_N.min()) - margin, float(value_N.max()) + margin
    axes = Axes(canvas, frame, x=limits, y=_limits(fitness_N))
    canvas.text(name, frame.left, frame.top - 7, px=7.5)
    canvas.text(f"{value_N[best]:.3g}", frame.right, frame.top - 7, px=7.5, colour=WARM, anchor="right")
    axes.curve(np.full(2, value_N[best]), np.array(_limits(fitness_N)), FAINT, 2.0)
    axes.dots(value_N, fitness_N, ACCENT, 2.0)
    axes.dots(value_N[[best]], fitness_N[[best]], WARM, 3.6)
    axes.close()


def _limits(fitness_N: np.ndarray) -> tuple[float, float]:
    low, high = float(fitness_N.min()), float(fitness_N.max())
    # A search without progress should look like a flat line, not like magnified noise.
    margin = 0.08 * (high - low) if high - low > 1e-3 else 0.05
    return max(0.0, low - margin), high + margin
