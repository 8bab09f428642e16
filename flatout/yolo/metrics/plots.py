"""Pictures of an evaluation: PR, F1, P and R curves and the confusion matrix. Needs matplotlib (extra `plots`).

Dimension key:  C classes   X points of a curve
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.errors import ConfigError
from flatout.yolo.metrics.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_CLASSES = 21
"""With fewer, every class is named; with more, only the mean is."""
FEW_NAMES = 99


def plot_evaluation(evaluation: Evaluation, names: Sequence[str], folder: Path) -> list[Path]:
    """Write PR_curve.png, F1_curve.png, P_curve.png, R_curve.png, and confusion_matrix.png if it was counted."""
    curves, drawn = evaluation.classes.curves, []
    for title, over, curve_CX, mean_text in (
        ("PR", "Recall", curves.precision_at_recall_CX, f"{evaluation.map50:.3f} mAP@0.5"),
        ("F1", "Confidence", curves.f1_CX, _best(curves.f1_CX)),
        ("P", "Confidence", curves.precision_CX, _best(curves.precision_CX)),
        ("R", "Confidence", curves.recall_CX, _best(curves.recall_CX)),
    ):
        figure, axes = _new_figure((9, 6))
        height = {"PR": "Precision", "F1": "F1", "P": "Precision", "R": "Recall"}[title]
        _draw_curves(axes, curves.points_X, curve_CX, _labels(evaluation, names, title), f"all classes {mean_text}")
        axes.set(xlabel=over, ylabel=height, xlim=(0, 1), ylim=(0, 1))
        drawn.append(_save(figure, folder / f"{title}_curve.png"))
    if evaluation.confusion is not None:
        drawn.append(_plot_confusion(evaluation.confusion, names, folder / "confusion_matrix.png"))
    return drawn


def column_shares(confusion: np.ndarray) -> np.ndarray:
    """Each column of a confusion matrix divided by its sum; shares below 0.005 are blank (not a number)."""
    shares = confusion / (confusion.sum(0, keepdims=True) + 1e-6)
    shares[shares < 0.005] = np.nan
    return np.asarray(shares)


def _best(curve_CX: np.ndarray) -> str:
    mean_X = curve_CX.mean(0) if len(curve_CX) else np.zeros(curve_CX.shape[1])
    return f"{mean_X.max():.2f} at {np.linspace(0, 1, len(mean_X))[mean_X.argmax()]:.3f}"


def _labels(evaluation: Evaluation, names: Sequence[str], title: str) -> list[str]:
    classes = evaluation.classes
    numbers = classes.classes_C.tolist()
    if title == "PR":
        return [f"{names[number]} {ap:.3f}" for number, ap in zip(numbers, classes.ap_CK[:, 0], strict=True)]
    return [names[number] for number in numbers]


def _draw_curves(axes: "Axes", points_X: np.ndarray, curve_CX: np.ndarray, labels: list[str], mean_label: str) -> None:
    few = len(labels) < FEW_CLASSES
    for curve_X, label in zip(curve_CX, labels, strict=True):
        axes.plot(points_X, curve_X, linewidth=1, label=label if few else None, color=None if few else "grey")
    if len(curve_CX):
        axes.plot(points_X, curve_CX.mean(0), linewidth=3, color="blue", label=mean_label)
        axes.legend(bbox_to_anchor=(1.04, 1), loc="upper left")


def _plot_confusion(confusion: np.ndarray, names: Sequence[str], path: Path) -> Path:
    figure, axes = _new_figure((12, 9))
    picture = axes.imshow(column_shares(confusion), cmap="Blues", vmin=0)
    figure.colorbar(picture)
    axes.set(xlabel="True", ylabel="Predicted")
    if len(names) < FEW_NAMES:
        places = range(len(names) + 1)
        axes.set_xticks(places, [*names, "background FP"], rotation=90)
        axes.set_yticks(places, [*names, "background FN"])
    return _save(figure, path)


def _new_figure(size_inch: tuple[float, float]) -> "tuple[Figure, Axes]":
    try:
        # Not pyplot: that keeps figures in a global list and may look for a screen.
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError('Plots need matplotlib, which is not installed: pip install "flatout[plots]".') from None
    figure = Figure(figsize=size_inch, layout="tight")
    return figure, figure.subplots()


def _save(figure: "Figure", path: Path) -> Path:
    figure.savefig(path, dpi=250)
    return path
