"""The chart of a grouping: a column of class names per head, and below them what the classes were grouped by.

Dimension key:  C classes
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.charts import (
    FAINT,
    INK,
    MUTED,
    PAPER,
    Axes,
    Canvas,
    Frame,
    colour_of,
    shade,
    shortened,
    ticks,
    write_image,
)
from flatout.errors import counted
from flatout.yolo.multihead.grouping.choose import GroupingResult
from flatout.yolo.multihead.grouping.statistics import ClassStatistics
from flatout.yolo.multihead.head_config import HeadConfig

# Columns of class names

COLUMN_W, COLUMNS = 156, 4
MARGIN, TOP = 24, 44
TITLE_H, LINE_H = 66, 13
LETTERS_PX, SMALL_PX, MAX_LETTERS = 7.5, 5.8, 20
MAX_NAMES = 40
"""Most names listed per head; the others are counted."""
GAP = 66
"""Between the columns and the chart below them."""


def plot_grouping(grouped: GroupingResult, path: Path) -> Path:
    """Plot a grouping to a PNG or JPEG file, by the extension of its name; returns the path."""
    config = grouped.grouping.config
    rows = [range(first, min(first + COLUMNS, config.num_heads)) for first in range(0, config.num_heads, COLUMNS)]
    heights = [max(_height(len(config.heads[head].classes)) for head in row) for row in rows]
    below = SIDE if grouped.similarity_CC is not None else CHART_H if grouped.statistics is not None else 0
    canvas = Canvas(2 * MARGIN + COLUMNS * COLUMN_W, TOP + sum(heights) + (below + GAP + 30 if below else 0) + MARGIN)
    title = f"{counted(config.nc, 'class')} in {counted(config.num_heads, 'head')}: {config.grouping}"
    canvas.text(title, MARGIN, 26, px=10, bold=True)
    top = float(TOP)
    for row, height in zip(rows, heights, strict=True):
        for column, head in enumerate(row):
            _plot_head(canvas, grouped, head, MARGIN + column * COLUMN_W, top)
        top += height
    if grouped.similarity_CC is not None:
        plot_similarity_map(canvas, config, grouped.similarity_CC, grouped.names, left=MARGIN, top=top + GAP)
    elif grouped.statistics is not None:
        plot_shapes(canvas, config, grouped.statistics, grouped.names, left=MARGIN, top=top + GAP)
    return write_image(path, canvas.render())


def _height(num_classes: int) -> int:
    return TITLE_H + (min(num_classes, MAX_NAMES) + (num_classes > MAX_NAMES)) * LINE_H + 18


def _plot_head(canvas: Canvas, grouped: GroupingResult, head: int, left: float, top: float) -> None:
    group, comment = grouped.grouping.config.heads[head], grouped.grouping.comments[head]
    right = left + COLUMN_W - 14
    canvas.filled_rectangle(left, top, right, top + 4, colour_of(head))
    canvas.text(f"head {head}", left, top + 19, px=8.5, bold=True)
    canvas.text(counted(len(group.classes), "class"), right, top + 19, px=SMALL_PX, colour=MUTED, anchor="right")
    name = "" if group.name == f"Head {head}" else group.name.removesuffix("_Group").replace("_", " ")
    weight = "" if group.weight == 1 else f"weight {group.weight:g}"
    for line, text in enumerate(part for part in (name, comment, weight) if part):
        fitted = _fitted(canvas, text, right - left)
        canvas.text(fitted, left, top + 33 + line * 12, px=SMALL_PX, colour=MUTED)
    canvas.line([(left, top + TITLE_H - 11), (right, top + TITLE_H - 11)], FAINT, 0.8)
    for line, text in enumerate(_lines(group.classes, grouped.names)):
        canvas.text(text, left, top + TITLE_H + 5 + line * LINE_H, px=LETTERS_PX, colour=INK)


def _lines(classes: Sequence[int], names: Sequence[str]) -> list[str]:
    shown = [f"{number:>2}  {shortened(names[number], MAX_LETTERS)}" for number in classes[:MAX_NAMES]]
    return shown + ([f"and {len(classes) - MAX_NAMES} more"] if len(classes) > MAX_NAMES else [])


def _fitted(canvas: Canvas, text: str, width: float) -> str:
    """The text, shortened to a width."""
    most = len(text)
    while most > 4 and canvas.text_width(shortened(text, most), SMALL_PX) > width:
        most -= 1
    return shortened(text, most)


# Map of similarity or confusion between classes, sorted by heads: blocks on the diagonal are heads

MAX_NAMES_OF_MAP = 100
MAX_LETTERS_OF_MAP = 16


NAMES_W, SIDE = 96, 400
"""Width of the names at the left, and side of the map itself."""


def plot_similarity_map(
    canvas: Canvas, config: HeadConfig, similarity_CC: np.ndarray, names: Sequence[str], *, left: float, top: float
) -> None:
    """Plot cells from light to dark; the darkest cell off the diagonal sets the scale."""
    order = [number for head in config.heads for number in head.classes]
    shown_CC = similarity_CC[np.ix_(order, order)]
    most = float((shown_CC * (1 - np.eye(len(order)))).max(initial=0)) or 1.0
    title, remark = _title(config)
    canvas.text(title, left, top - 30, px=9, bold=True)
    canvas.text(f"{remark} The darkest cell is {most:.2f}.", left, top - 14, px=7, colour=MUTED)
    left += NAMES_W
    colours = [[shade(min(1.0, value / most)) if value else PAPER for value in row] for row in shown_CC.tolist()]
    canvas.image(np.array(colours, np.uint8), left, top, SIDE, SIDE)
    canvas.rectangle(left, top, left + SIDE, top + SIDE, INK, 0.8)
    cell = SIDE / len(order)
    _plot_heads(canvas, config, left, top, cell)
    if len(order) <= MAX_NAMES_OF_MAP:
        _plot_names(canvas, [shortened(names[number], MAX_LETTERS_OF_MAP) for number in order], left, top, cell)


def _title(config: HeadConfig) -> tuple[str, str]:
    if config.grouping == "anticonfusion":
        return "Confusion between classes", "Dark cells should be outside the frames, which are the heads."
    return "Similarity of classes", "Dark cells should be inside the frames, which are the heads."


def _plot_heads(canvas: Canvas, config: HeadConfig, left: float, top: float, cell: float) -> None:
    first = 0
    for number, head in enumerate(config.heads):
        begin, end = first * cell, (first + len(head.classes)) * cell
        canvas.rectangle(left + begin, top + begin, left + end, top + end, colour_of(number), 1.6)
        canvas.filled_rectangle(left + SIDE + 6, top + begin + 1, left + SIDE + 10, top + end - 1, colour_of(number))
        canvas.text(f"head {number}", left + SIDE + 15, top + (begin + end) / 2 + 3.5, px=7)
        first += len(head.classes)


def _plot_names(canvas: Canvas, labels: Sequence[str], left: float, top: float, cell: float) -> None:
    px = min(7.0, cell * 0.75)
    for row, text in enumerate(labels):
        canvas.text(text, left - 5, top + (row + 0.5) * cell + px / 2, px=px, anchor="right")


# Shapes and numbers of boxes of the classes, in the colours of their heads

CHART_H = 230
MAX_NAMES_OF_SHAPES = 40
"""With more classes only the dots are plotted."""
MIN_TICKS = 3
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.75, 1.0, 1.33, 2.0, 3.0, 5.0, 10.0)


def plot_shapes(
    canvas: Canvas, config: HeadConfig, statistics: ClassStatistics, names: Sequence[str], *, left: float, top: float
) -> None:
    """Plot the mean width / height (x, logarithmic) and the number of boxes (y, in powers of ten) of every class."""
    log_ratio_C, power_C = statistics.log_ratio_C, np.log10(np.maximum(statistics.num_boxes_C, 1))
    low, high = float(log_ratio_C.min()), float(log_ratio_C.max())
    margin = 0.06 * (high - low) + 0.05
    place = Frame(left + 34, top, canvas.width - left, top + CHART_H)
    limits = (low - margin, high + margin)
    axes = Axes(
        canvas, place, x=limits, y=(0, float(power_C.max()) * 1.15 + 0.1), title="Shape and number of boxes",
        x_label="mean width / height", y_label="boxes, as a power of 10", x_ticks=False,
    )  # fmt: skip
    _plot_ratio_ticks(axes, limits)
    for number, head in enumerate(config.heads):
        classes = list(head.classes)
        axes.dots(log_ratio_C[classes], power_C[classes], colour_of(number), 3)
    if config.nc <= MAX_NAMES_OF_SHAPES:
        for number, (x, y) in enumerate(axes.to_px(log_ratio_C, power_C).tolist()):
            canvas.text(shortened(names[number], 14), x + 5, y + 2.5, px=6.5, colour=INK)
    axes.close()


def _plot_ratio_ticks(axes: Axes, limits: tuple[float, float]) -> None:
    """Plot the ticks of the logarithmic axis."""
    for ratio, text in ratio_ticks(*limits):
        (x, _), *_ = axes.to_px(np.array([np.log(ratio)]), np.array([0.0])).tolist()
        axes.canvas.line([(x, axes.frame.top), (x, axes.frame.bottom)], FAINT, 0.7)
        axes.canvas.text(text, x, axes.frame.bottom + 15, px=7.5, colour=MUTED, anchor="middle")


def ratio_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ratios between two logarithms, with their labels; evenly spaced if all boxes have about the same shape."""
    usual = [(ratio, f"{ratio:g}") for ratio in RATIOS if low <= np.log(ratio) <= high]
    return usual if len(usual) >= MIN_TICKS else ticks(float(np.exp(low)), float(np.exp(high)), most=6)
