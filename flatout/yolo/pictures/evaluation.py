"""All pictures of an evaluation that need no images: four curves and the confusion matrix."""

from collections.abc import Sequence
from pathlib import Path

from flatout.yolo.metrics import Evaluation
from flatout.yolo.pictures.confusion import draw_confusion
from flatout.yolo.pictures.curves import draw_curves


def plot_evaluation(evaluation: Evaluation, names: Sequence[str], folder: Path) -> list[Path]:
    """Write PR_curve.png, F1_curve.png, P_curve.png, R_curve.png, and confusion_matrix.png if it was counted.

    There are no curves where no detection was right.
    """
    drawn = draw_curves(evaluation, names, folder) if len(evaluation.classes.classes_C) else []
    if evaluation.confusion is not None:
        drawn.append(draw_confusion(evaluation.confusion, names, folder / "confusion_matrix.png"))
    return drawn
