"""What the labels of a data set are like: how many of each class, where they lie, how large they are.

Dimension key:  T labels   C classes
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.charts.axes import Axes, Place
from flatout.charts.boxes import name_of
from flatout.charts.evaluation import shade
from flatout.charts.sheet import INK, MUTED, PAPER, Sheet, colour_of, shortened, write_picture

SIDE = 300
LEFT, TOP, GAP = 66, 44, 92
BINS = 75
MOST_NAMES = 30
MOST_OUTLINES = 400


def draw_label_statistics(label_T5: np.ndarray, names: Sequence[str], file: Path) -> Path:
    """Four panels: labels per class, outlines of boxes laid over each other, where centres are, how large boxes are.

    A label is its class, centre, width and height, as shares of its image.
    """
    class_T = label_T5[:, 0].astype(np.int64)
    count_C = np.bincount(class_T[class_T < len(names)], minlength=len(names))
    sheet = Sheet(LEFT + 2 * SIDE + GAP + 30, TOP + 2 * SIDE + GAP + 72)
    (first, second), (third, fourth) = ([_place(column, row) for column in range(2)] for row in range(2))
    _draw_counts(sheet, first, count_C, names)
    _draw_outlines(sheet, second, label_T5)
    _draw_density(sheet, third, label_T5[:, 1:3], "Where boxes are", "centre x", "centre y", y=(1, 0))
    _draw_density(sheet, fourth, label_T5[:, 3:5], "How large boxes are", "width", "height", y=(0, 1))
    return write_picture(file, sheet.picture())


def _place(column: int, row: int) -> Place:
    left, top = LEFT + column * (SIDE + GAP), TOP + row * (SIDE + GAP + 26)
    return Place(left, top, left + SIDE, top + SIDE)


def _draw_counts(sheet: Sheet, place: Place, count_C: np.ndarray, names: Sequence[str]) -> None:
    num_classes = len(count_C)
    axes = Axes(
        sheet,
        place,
        x=(0, num_classes),
        y=(0, float(max(1, count_C.max(initial=0))) * 1.08),
        title="Labels per class",
        y_label="labels",
        whole_x=True,
        x_ticks=num_classes > MOST_NAMES,
        x_label="class" if num_classes > MOST_NAMES else "",
    )
    for number, count in enumerate(count_C.tolist()):
        axes.bar(number + 0.1, number + 0.9, count, colour_of(number))
        if num_classes <= MOST_NAMES:
            _write_class(axes, number, count, shortened(name_of(number, names), 16), SIDE / num_classes)
    axes.close()


def _write_class(axes: Axes, number: int, count: int, name: str, room: float) -> None:
    """The name below a column, and its number above where there is room."""
    (x, y), *_ = axes.to_px(np.array([number + 0.5]), np.array([float(count)])).tolist()
    if axes.sheet.text_width(str(count), 7) < room:
        axes.sheet.text(str(count), x, y - 4, px=7, colour=MUTED, anchor="middle")
    axes.sheet.rising_text(name, x + 3.5, axes.place.bottom + 7, px=min(7, room * 0.7), colour=INK, anchor="right")


def _draw_outlines(sheet: Sheet, place: Place, label_T5: np.ndarray) -> None:
    """Boxes as if all had the same centre, at most MOST_OUTLINES, spread evenly over the set."""
    axes = Axes(sheet, place, x=(-0.5, 0.5), y=(-0.5, 0.5), title="Shapes of boxes", x_label="share of the picture")
    chosen = np.linspace(0, len(label_T5) - 1, min(MOST_OUTLINES, len(label_T5))).round().astype(int)
    for number, _, _, width, height in label_T5[chosen].tolist():
        (left, top), (right, bottom) = axes.to_px(np.array([-width, width]) / 2, np.array([height, -height]) / 2)
        sheet.frame(left, top, right, bottom, colour_of(int(number)), 0.6)
    axes.close()


def _draw_density(
    sheet: Sheet, place: Place, xy_T2: np.ndarray, title: str, x_label: str, y_label: str, *, y: tuple[float, float]
) -> None:
    """How many labels fall into each of BINS x BINS cells of 0..1; `y` is bottom and top: a picture's y goes down."""
    axes = Axes(sheet, place, x=(0, 1), y=y, title=title, x_label=x_label, y_label=y_label)
    counts, _, _ = np.histogram2d(xy_T2[:, 1], xy_T2[:, 0], BINS, ((0, 1), (0, 1)))
    shares = np.sqrt(counts / max(1.0, counts.max()))  # so that rare places are visible
    rows = shares[:: 1 if y[0] > y[1] else -1].tolist()
    colours = np.array([[shade(share) if share else PAPER for share in row] for row in rows], np.uint8)
    sheet.image(colours, place.left, place.top, SIDE, SIDE)
    axes.close()
