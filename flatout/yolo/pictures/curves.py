"""PR, F1, P and R curves of an evaluation.

Dimension key:  C classes   X points of a curve
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.yolo.metrics import Evaluation
from flatout.yolo.pictures.axes import Axes, Place
from flatout.yolo.pictures.boxes import name_of
from flatout.yolo.pictures.lettering import shortened
from flatout.yolo.pictures.palette import ACCENT, INK, MUTED, Colour, colour_of
from flatout.yolo.pictures.picture_file import write_picture
from flatout.yolo.pictures.sheet import Sheet

FEW_CLASSES = 21
"""With fewer, every class has its colour and its name; with more, all are grey and only the mean is named."""
MANY: Colour = (200, 196, 192)
PLOT = Place(left=66, top=44, right=616, bottom=430)
HEIGHT = 484


def draw_curves(evaluation: Evaluation, names: Sequence[str], folder: Path) -> list[Path]:
    """Write PR_curve.png, F1_curve.png, P_curve.png and R_curve.png."""
    found = evaluation.classes
    curves, own = found.curves, [name_of(number, names) for number in found.classes_C.tolist()]
    with_ap = [f"{name} {ap:.3f}" for name, ap in zip(own, found.ap_CK[:, 0], strict=True)]
    mean = f"all classes {evaluation.map50:.3f} mAP@0.5"
    drawn = [_draw("PR", "Recall", "Precision", curves.precision_at_recall_CX, with_ap, mean, evaluation, folder)]
    for title, label, curve_CX in (
        ("F1", "F1", curves.f1_CX),
        ("P", "Precision", curves.precision_CX),
        ("R", "Recall", curves.recall_CX),
    ):
        mean = f"all classes {best(curve_CX)}"
        drawn.append(_draw(title, "Confidence", label, curve_CX, own, mean, evaluation, folder))
    return drawn


def best(curve_CX: np.ndarray) -> str:
    """The highest value of the mean of all classes, and where it is."""
    mean_X = curve_CX.mean(0)
    return f"{mean_X.max():.2f} at {np.linspace(0, 1, len(mean_X))[mean_X.argmax()]:.3f}"


def _draw(
    title: str,
    x_label: str,
    y_label: str,
    curve_CX: np.ndarray,
    labels: Sequence[str],
    mean_label: str,
    evaluation: Evaluation,
    folder: Path,
) -> Path:
    few = len(labels) < FEW_CLASSES
    numbers = evaluation.classes.classes_C.tolist()
    legend = [(shortened(label, 30), colour_of(number)) for label, number in zip(labels, numbers, strict=True)]
    shown = [*(legend if few else [(f"{len(labels)} classes", MANY)]), (mean_label, ACCENT)]
    sheet = Sheet(_width(shown), HEIGHT)
    heading = f"{y_label} over {x_label.lower()}"
    axes = Axes(sheet, PLOT, x=(0, 1), y=(0, 1), title=heading, x_label=x_label, y_label=y_label)
    points_X = evaluation.classes.curves.points_X
    for curve_X, (_, colour) in zip(curve_CX, legend, strict=True):
        axes.curve(points_X, curve_X, colour if few else MANY, 1.4 if few else 0.8)
    axes.curve(points_X, curve_CX.mean(0), ACCENT, 3.2)
    axes.close()
    _draw_legend(sheet, shown)
    return write_picture(folder / f"{title}_curve.png", sheet.picture())


def _width(shown: Sequence[tuple[str, Colour]]) -> int:
    ruler = Sheet(1, 1)
    return round(PLOT.right + 58 + max(ruler.text_width(text, 8, bold=True) for text, _ in shown))


def _draw_legend(sheet: Sheet, shown: Sequence[tuple[str, Colour]]) -> None:
    left, top, step = PLOT.right + 18, PLOT.top + 10, min(20.0, (PLOT.bottom - PLOT.top) / max(1, len(shown)))
    for place, (text, colour) in enumerate(shown):
        y, is_mean = top + place * step, colour == ACCENT
        sheet.line([(left, y), (left + 18, y)], colour, 3.2 if is_mean else 2)
        sheet.text(text, left + 26, y + 4, px=8, bold=is_mean, colour=INK if is_mean or colour != MANY else MUTED)
