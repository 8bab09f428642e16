"""A grouping as a picture: a column of class names per head, and below them what the heads were chosen by."""

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
from flatout.yolo.multihead.grouping.choose import Grouped
from flatout.yolo.multihead.grouping.statistics import ClassStatistics
from flatout.yolo.multihead.head_config import HeadConfig

# How alike classes are, or how much they are mixed up, as a map sorted by heads: blocks on the diagonal are heads.
#
# Dimension key:  C classes

MOST_NAMES_OF_MAP = 100
MOST_LETTERS_OF_MAP = 16


NAMES_W, SIDE = 96, 400
"""Of the names at the left, and of the map itself."""


def draw_map(
    sheet: Canvas, config: HeadConfig, likeness_CC: np.ndarray, names: Sequence[str], *, left: float, top: float
) -> None:
    """Cells from light to dark; the darkest cell off the diagonal sets the scale."""
    order = [number for head in config.heads for number in head.classes]
    shown_CC = likeness_CC[np.ix_(order, order)]
    most = float((shown_CC * (1 - np.eye(len(order)))).max(initial=0)) or 1.0
    title, remark = _title(config)
    sheet.text(title, left, top - 30, px=9, bold=True)
    sheet.text(f"{remark} The darkest cell is {most:.2f}.", left, top - 14, px=7, colour=MUTED)
    left += NAMES_W
    colours = [[shade(min(1.0, value / most)) if value else PAPER for value in row] for row in shown_CC.tolist()]
    sheet.image(np.array(colours, np.uint8), left, top, SIDE, SIDE)
    sheet.rectangle(left, top, left + SIDE, top + SIDE, INK, 0.8)
    cell = SIDE / len(order)
    _draw_heads(sheet, config, left, top, cell)
    if len(order) <= MOST_NAMES_OF_MAP:
        _draw_names(sheet, [shortened(names[number], MOST_LETTERS_OF_MAP) for number in order], left, top, cell)


def _title(config: HeadConfig) -> tuple[str, str]:
    if config.grouping == "anticonfusion":
        return "What is mixed up", "Dark cells should lie outside the frames."
    return "How alike classes are", "Dark cells should lie inside the frames, which are the heads."


def _draw_heads(sheet: Canvas, config: HeadConfig, left: float, top: float, cell: float) -> None:
    first = 0
    for number, head in enumerate(config.heads):
        begin, end = first * cell, (first + len(head.classes)) * cell
        sheet.rectangle(left + begin, top + begin, left + end, top + end, colour_of(number), 1.6)
        sheet.filled_rectangle(left + SIDE + 6, top + begin + 1, left + SIDE + 10, top + end - 1, colour_of(number))
        sheet.text(f"head {number}", left + SIDE + 15, top + (begin + end) / 2 + 3.5, px=7)
        first += len(head.classes)


def _draw_names(sheet: Canvas, labels: Sequence[str], left: float, top: float, cell: float) -> None:
    px = min(7.0, cell * 0.75)
    for place, text in enumerate(labels):
        sheet.text(text, left - 5, top + (place + 0.5) * cell + px / 2, px=px, anchor="right")


# The shapes of classes on a line, in the colours of their heads: where one head ends and the next begins.
#
# Dimension key:  C classes

CHART_H = 230
MOST_NAMES_OF_SHAPES = 40
"""With more classes only the dots are drawn."""
FEWEST_TICKS = 3
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.75, 1.0, 1.33, 2.0, 3.0, 5.0, 10.0)


def draw_shapes(
    sheet: Canvas, config: HeadConfig, statistics: ClassStatistics, names: Sequence[str], *, left: float, top: float
) -> None:
    """Across: mean width / height, in even steps of its logarithm. Up: boxes, likewise in powers of ten."""
    log_ratio_C, power_C = statistics.log_ratio_C, np.log10(np.maximum(statistics.num_boxes_C, 1))
    low, high = float(log_ratio_C.min()), float(log_ratio_C.max())
    margin = 0.06 * (high - low) + 0.05
    place = Frame(left + 34, top, sheet.width - left, top + CHART_H)
    limits = (low - margin, high + margin)
    axes = Axes(
        sheet, place, x=limits, y=(0, float(power_C.max()) * 1.15 + 0.1), title="Shape and number of boxes",
        x_label="mean width / height", y_label="boxes, as a power of 10", x_ticks=False,
    )  # fmt: skip
    _draw_ratios(axes, limits)
    for number, head in enumerate(config.heads):
        classes = list(head.classes)
        axes.dots(log_ratio_C[classes], power_C[classes], colour_of(number), 3)
    if config.nc <= MOST_NAMES_OF_SHAPES:
        for number, (x, y) in enumerate(axes.to_px(log_ratio_C, power_C).tolist()):
            sheet.text(shortened(names[number], 14), x + 5, y + 2.5, px=6.5, colour=INK)
    axes.close()


def _draw_ratios(axes: Axes, limits: tuple[float, float]) -> None:
    """The ticks, which are no even numbers on a logarithm."""
    for ratio, text in ratio_ticks(*limits):
        (x, _), *_ = axes.to_px(np.array([np.log(ratio)]), np.array([0.0])).tolist()
        axes.canvas.line([(x, axes.frame.top), (x, axes.frame.bottom)], FAINT, 0.7)
        axes.canvas.text(text, x, axes.frame.bottom + 15, px=7.5, colour=MUTED, anchor="middle")


def ratio_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ratios between two logarithms, and how they are written; even numbers where all boxes have about one shape."""
    usual = [(ratio, f"{ratio:g}") for ratio in RATIOS if low <= np.log(ratio) <= high]
    return usual if len(usual) >= FEWEST_TICKS else ticks(float(np.exp(low)), float(np.exp(high)), most=6)


COLUMN_W, COLUMNS = 156, 4
MARGIN, TOP = 24, 44
TITLE_H, LINE_H = 66, 13
LETTERS_PX, SMALL_PX, MOST_LETTERS = 7.5, 5.8, 20
MOST_NAMES = 40
"""Of one head; the others are counted."""
GAP = 66
"""Between the columns and what is below them."""


def draw_grouping(grouped: Grouped, path: Path) -> Path:
    """PNG or JPEG, by the ending of the name."""
    config = grouped.grouping.config
    rows = [range(first, min(first + COLUMNS, config.num_heads)) for first in range(0, config.num_heads, COLUMNS)]
    heights = [max(_height(len(config.heads[head].classes)) for head in row) for row in rows]
    below = SIDE if grouped.likeness_CC is not None else CHART_H if grouped.statistics is not None else 0
    sheet = Canvas(2 * MARGIN + COLUMNS * COLUMN_W, TOP + sum(heights) + (below + GAP + 30 if below else 0) + MARGIN)
    title = f"{counted(config.nc, 'class')} in {counted(config.num_heads, 'head')}: {config.grouping}"
    sheet.text(title, MARGIN, 26, px=10, bold=True)
    top = float(TOP)
    for row, height in zip(rows, heights, strict=True):
        for place, head in enumerate(row):
            _draw_head(sheet, grouped, head, MARGIN + place * COLUMN_W, top)
        top += height
    if grouped.likeness_CC is not None:
        draw_map(sheet, config, grouped.likeness_CC, grouped.names, left=MARGIN, top=top + GAP)
    elif grouped.statistics is not None:
        draw_shapes(sheet, config, grouped.statistics, grouped.names, left=MARGIN, top=top + GAP)
    return write_image(path, sheet.render())


def _height(num_classes: int) -> int:
    return TITLE_H + (min(num_classes, MOST_NAMES) + (num_classes > MOST_NAMES)) * LINE_H + 18


def _draw_head(sheet: Canvas, grouped: Grouped, head: int, left: float, top: float) -> None:
    group, comment = grouped.grouping.config.heads[head], grouped.grouping.comments[head]
    right = left + COLUMN_W - 14
    sheet.filled_rectangle(left, top, right, top + 4, colour_of(head))
    sheet.text(f"head {head}", left, top + 19, px=8.5, bold=True)
    counted = f"{len(group.classes)} class{'es' if len(group.classes) > 1 else ''}"
    sheet.text(counted, right, top + 19, px=SMALL_PX, colour=MUTED, anchor="right")
    name = "" if group.name == f"Head {head}" else group.name.removesuffix("_Group").replace("_", " ")
    weight = "" if group.weight == 1 else f"weight {group.weight:g}"
    for place, text in enumerate(part for part in (name, comment, weight) if part):
        fitted = _fitted(sheet, text, right - left)
        sheet.text(fitted, left, top + 33 + place * 12, px=SMALL_PX, colour=MUTED)
    sheet.line([(left, top + TITLE_H - 11), (right, top + TITLE_H - 11)], FAINT, 0.8)
    for place, text in enumerate(_lines(group.classes, grouped.names)):
        sheet.text(text, left, top + TITLE_H + 5 + place * LINE_H, px=LETTERS_PX, colour=INK)


def _lines(classes: Sequence[int], names: Sequence[str]) -> list[str]:
    shown = [f"{number:>2}  {shortened(names[number], MOST_LETTERS)}" for number in classes[:MOST_NAMES]]
    return shown + ([f"and {len(classes) - MOST_NAMES} more"] if len(classes) > MOST_NAMES else [])


def _fitted(sheet: Canvas, text: str, width: float) -> str:
    """As many letters as there is room for."""
    most = len(text)
    while most > 4 and sheet.text_width(shortened(text, most), SMALL_PX) > width:
        most -= 1
    return shortened(text, most)
