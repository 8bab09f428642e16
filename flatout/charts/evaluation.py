"""Charts without images: confusion matrix, curves of an evaluation, and statistics of the labels of a data set.

Dimension key:  C classes   X points of a curve   T labels
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.charts.boxes import name_of
from flatout.charts.canvas import (
    ACCENT,
    FAINT,
    INK,
    MUTED,
    PAPER,
    Axes,
    Canvas,
    Colour,
    Frame,
    colour_of,
    ink_on,
    shortened,
    write_image,
)

# Confusion matrix: columns are true classes, rows are predicted classes

FEW_NUMBERS = 30
"""Up to this many classes (background included), every cell shows its number."""
MAX_NAMES = 99
DARK: Colour = (122, 54, 8)
LIGHT: Colour = (255, 251, 247)


def plot_confusion(counts: np.ndarray, names: Sequence[str], path: Path) -> Path:
    """Plot counts (int64 [C + 1, C + 1], as in `ConfusionMatrix`) as fractions of each true class."""
    shares = column_shares(as_shown(counts))
    side = len(shares)
    cell = max(9.0, min(56.0, 760 / side))
    letters = min(8.5, max(4.5, cell * 0.55))
    labels = [shortened(name_of(number, names), 22) for number in range(side - 1)] + ["background"]
    longest = max(Canvas(1, 1).text_width(text, letters) for text in labels)
    left, top, width = 44 + longest, 44.0, side * cell
    canvas = Canvas(round(left + width + 84), round(top + width + longest + 46))
    canvas.text("Confusion matrix", left + width / 2, 24, px=10, anchor="middle", bold=True)
    _plot_cells(canvas, shares, left, top, cell)
    if side <= MAX_NAMES:
        _plot_names(canvas, labels, left, top, cell, letters)
    canvas.text("True", left + width / 2, top + width + longest + 32, px=9, anchor="middle", bold=True)
    canvas.rising_text("Predicted", 20, top + width / 2, px=9, bold=True)
    _plot_colour_scale(canvas, left + width + 24, top, min(300.0, width))
    return write_image(path, canvas.render())


def as_shown(counts: np.ndarray) -> np.ndarray:
    """The counts of YOLOv7's confusion matrix with one rule for all cells: row = predicted, column = true.

    YOLOv7 counts matched detections at [true, predicted], but missed objects and false positives the other way round,
    and plots everything as if the row were the prediction. This plot is right.
    """
    shown = counts.copy()
    shown[:-1, :-1] = counts[:-1, :-1].T
    return shown


def column_shares(confusion: np.ndarray) -> np.ndarray:
    """Each column of a confusion matrix divided by its sum; values below 0.005 are left blank (NaN)."""
    shares = confusion / (confusion.sum(0, keepdims=True) + 1e-6)
    shares[shares < 0.005] = np.nan
    return np.asarray(shares)


def shade(share: float) -> Colour:
    """Colour of a value from 0 (light) to 1 (dark)."""
    low, high = np.array(LIGHT, float), np.array(DARK, float)
    blue, green, red = (low + (high - low) * min(1.0, share) ** 0.8).round().astype(int).tolist()
    return blue, green, red


def _plot_cells(canvas: Canvas, shares: np.ndarray, left: float, top: float, cell: float) -> None:
    side = len(shares)
    for row, column in np.argwhere(~np.isnan(shares)).tolist():
        x, y, share = left + column * cell, top + row * cell, float(shares[row, column])
        colour = shade(share)
        canvas.filled_rectangle(x, y, x + cell, y + cell, colour)
        if side <= FEW_NUMBERS:
            px = min(8.5, cell * 0.24)
            canvas.text(
                f"{share:.2f}", x + cell / 2, y + cell / 2 + px / 2, px=px, colour=ink_on(colour), anchor="middle"
            )
    for number in range(1, side):
        canvas.line([(left + number * cell, top), (left + number * cell, top + side * cell)], FAINT, 0.5)
        canvas.line([(left, top + number * cell), (left + side * cell, top + number * cell)], FAINT, 0.5)
    canvas.rectangle(left, top, left + side * cell, top + side * cell, INK, 0.8)


def _plot_names(canvas: Canvas, labels: Sequence[str], left: float, top: float, cell: float, px: float) -> None:
    bottom = top + len(labels) * cell
    for number, text in enumerate(labels):
        middle = (number + 0.5) * cell
        colour = MUTED if number == len(labels) - 1 else INK
        canvas.text(text, left - 8, top + middle + px / 2, px=px, colour=colour, anchor="right")
        canvas.rising_text(text, left + middle + px / 2, bottom + 8, px=px, colour=colour, anchor="right")


def _plot_colour_scale(canvas: Canvas, left: float, top: float, height: float) -> None:
    """The scale of shades, from 0 to 1."""
    column = np.array([[shade(1 - step / 255)] for step in range(256)], np.uint8)
    canvas.image(column, left, top, 14, height)
    canvas.rectangle(left, top, left + 14, top + height, INK, 0.6)
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        canvas.text(f"{share:.1f}", left + 20, top + (1 - share) * height + 4, px=7.5, colour=MUTED)


# PR, F1, P and R curves of an evaluation

FEW_CLASSES = 21
"""With fewer classes, each has its colour and name; otherwise all are grey and only the mean is named."""
MANY: Colour = (200, 196, 192)
PLOT = Frame(left=66, top=44, right=616, bottom=430)
HEIGHT = 484


class ClassCurves(NamedTuple):
    """Curves of the classes that occur, at X evenly spaced points from 0 to 1."""

    classes_C: np.ndarray
    ap50_C: np.ndarray
    precision_at_recall_CX: np.ndarray
    precision_CX: np.ndarray
    recall_CX: np.ndarray
    f1_CX: np.ndarray
    """Precision, recall and F1 are over the confidence threshold."""


def plot_curves(found: ClassCurves, names: Sequence[str], folder: Path) -> list[Path]:
    """Write PR_curve.png, F1_curve.png, P_curve.png and R_curve.png."""
    own = [name_of(number, names) for number in found.classes_C.tolist()]
    with_ap = [f"{name} {ap:.3f}" for name, ap in zip(own, found.ap50_C, strict=True)]
    legend = [colour_of(number) for number in found.classes_C.tolist()]
    mean = f"all classes {found.ap50_C.mean():.3f} mAP@0.5"
    curve_CX = found.precision_at_recall_CX
    paths = [_plot_curve("PR", "Recall", "Precision", curve_CX, [*zip(with_ap, legend, strict=True)], mean, folder)]
    for title, label, curve_CX in (
        ("F1", "F1", found.f1_CX),
        ("P", "Precision", found.precision_CX),
        ("R", "Recall", found.recall_CX),
    ):
        mean = f"all classes {best(curve_CX)}"
        paths.append(_plot_curve(title, "Confidence", label, curve_CX, [*zip(own, legend, strict=True)], mean, folder))
    return paths


def best(curve_CX: np.ndarray) -> str:
    """Highest value of the mean over all classes, and the confidence at which it is reached."""
    mean_X = curve_CX.mean(0)
    return f"{mean_X.max():.2f} at {np.linspace(0, 1, len(mean_X))[mean_X.argmax()]:.3f}"


def _plot_curve(
    title: str,
    x_label: str,
    y_label: str,
    curve_CX: np.ndarray,
    classes: Sequence[tuple[str, Colour]],
    mean_label: str,
    folder: Path,
) -> Path:
    few = len(classes) < FEW_CLASSES
    legend = [(shortened(label, 30), colour) for label, colour in classes]
    shown = [*(legend if few else [(f"{len(classes)} classes", MANY)]), (mean_label, ACCENT)]
    canvas = Canvas(_width(shown), HEIGHT)
    heading = f"{y_label} over {x_label.lower()}"
    axes = Axes(canvas, PLOT, x=(0, 1), y=(0, 1), title=heading, x_label=x_label, y_label=y_label)
    points_X = np.linspace(0, 1, curve_CX.shape[1])
    for curve_X, (_, colour) in zip(curve_CX, legend, strict=True):
        axes.curve(points_X, curve_X, colour if few else MANY, 1.4 if few else 0.8)
    axes.curve(points_X, curve_CX.mean(0), ACCENT, 3.2)
    axes.close()
    _plot_legend(canvas, shown)
    return write_image(folder / f"{title}_curve.png", canvas.render())


def _width(shown: Sequence[tuple[str, Colour]]) -> int:
    ruler = Canvas(1, 1)
    return round(PLOT.right + 58 + max(ruler.text_width(text, 8, bold=True) for text, _ in shown))


def _plot_legend(canvas: Canvas, shown: Sequence[tuple[str, Colour]]) -> None:
    left, top, step = PLOT.right + 18, PLOT.top + 10, min(20.0, (PLOT.bottom - PLOT.top) / max(1, len(shown)))
    for number, (text, colour) in enumerate(shown):
        y, is_mean = top + number * step, colour == ACCENT
        canvas.line([(left, y), (left + 18, y)], colour, 3.2 if is_mean else 2)
        canvas.text(text, left + 26, y + 4, px=8, bold=is_mean, colour=INK if is_mean or colour != MANY else MUTED)


# Label statistics

SIDE = 300
LEFT, TOP, GAP = 66, 44, 92
BINS = 75
MAX_NAMED_BARS = 30
MAX_OUTLINES = 400


def plot_label_statistics(label_T5: np.ndarray, names: Sequence[str], file: Path) -> Path:
    """Plot four panels: labels per class, outlines of boxes, positions of centres, and sizes of boxes.

    A label is (class, centre x, centre y, width, height), relative to its image.
    """
    class_T = label_T5[:, 0].astype(np.int64)
    count_C = np.bincount(class_T[class_T < len(names)], minlength=len(names))
    canvas = Canvas(LEFT + 2 * SIDE + GAP + 30, TOP + 2 * SIDE + GAP + 72)
    (first, second), (third, fourth) = ([_panel_frame(column, row) for column in range(2)] for row in range(2))
    _plot_counts(canvas, first, count_C, names)
    _plot_outlines(canvas, second, label_T5)
    _plot_density(canvas, third, label_T5[:, 1:3], "Positions of boxes", "centre x", "centre y", y=(1, 0))
    _plot_density(canvas, fourth, label_T5[:, 3:5], "Sizes of boxes", "width", "height", y=(0, 1))
    return write_image(file, canvas.render())


def _panel_frame(column: int, row: int) -> Frame:
    left, top = LEFT + column * (SIDE + GAP), TOP + row * (SIDE + GAP + 26)
    return Frame(left, top, left + SIDE, top + SIDE)


def _plot_counts(canvas: Canvas, frame: Frame, count_C: np.ndarray, names: Sequence[str]) -> None:
    num_classes = len(count_C)
    axes = Axes(
        canvas,
        frame,
        x=(0, num_classes),
        y=(0, float(max(1, count_C.max(initial=0))) * 1.08),
        title="Labels per class",
        y_label="labels",
        whole_x=True,
        x_ticks=num_classes > MAX_NAMED_BARS,
        x_label="class" if num_classes > MAX_NAMED_BARS else "",
    )
    for number, count in enumerate(count_C.tolist()):
        axes.bar(number + 0.1, number + 0.9, count, colour_of(number))
        if num_classes <= MAX_NAMED_BARS:
            _write_class(axes, number, count, shortened(name_of(number, names), 16), SIDE / num_classes)
    axes.close()


def _write_class(axes: Axes, number: int, count: int, name: str, room: float) -> None:
    """Write the class name below a bar, and its count above if there is room."""
    (x, y), *_ = axes.to_px(np.array([number + 0.5]), np.array([float(count)])).tolist()
    if axes.canvas.text_width(str(count), 7) < room:
        axes.canvas.text(str(count), x, y - 4, px=7, colour=MUTED, anchor="middle")
    axes.canvas.rising_text(name, x + 3.5, axes.frame.bottom + 7, px=min(7, room * 0.7), colour=INK, anchor="right")


def _plot_outlines(canvas: Canvas, frame: Frame, label_T5: np.ndarray) -> None:
    """Outlines of boxes around a common centre; at most MAX_OUTLINES, taken evenly from the set."""
    axes = Axes(canvas, frame, x=(-0.5, 0.5), y=(-0.5, 0.5), title="Shapes of boxes", x_label="relative to the image")
    chosen = np.linspace(0, len(label_T5) - 1, min(MAX_OUTLINES, len(label_T5))).round().astype(int)
    for number, _, _, width, height in label_T5[chosen].tolist():
        (left, top), (right, bottom) = axes.to_px(np.array([-width, width]) / 2, np.array([height, -height]) / 2)
        canvas.rectangle(left, top, right, bottom, colour_of(int(number)), 0.6)
    axes.close()


def _plot_density(
    canvas: Canvas, frame: Frame, xy_T2: np.ndarray, title: str, x_label: str, y_label: str, *, y: tuple[float, float]
) -> None:
    """Number of labels in each of BINS x BINS cells of 0..1; `y` is (bottom, top), as y points down in an image."""
    axes = Axes(canvas, frame, x=(0, 1), y=y, title=title, x_label=x_label, y_label=y_label)
    counts, _, _ = np.histogram2d(xy_T2[:, 1], xy_T2[:, 0], BINS, ((0, 1), (0, 1)))
    shares = np.sqrt(counts / max(1.0, counts.max()))  # so that cells with few labels are visible
    rows = shares[:: 1 if y[0] > y[1] else -1].tolist()
    colours = np.array([[shade(share) if share else PAPER for share in row] for row in rows], np.uint8)
    canvas.image(colours, frame.left, frame.top, SIDE, SIDE)
    axes.close()
