"""The result of an evaluation: its scores by name, and the one number by which checkpoints are compared.

`SCORES` lists the scores there are. The table of `test`, results.csv, log.jsonl, callbacks and loggers follow from it.

Dimension key:  C classes that occur in the labels   K overlap thresholds
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flatout.yolo.metrics.average_precision import ClassScores


class Score(NamedTuple):
    """One number that an evaluation comes to."""

    name: str
    """In files; loggers put `metrics/` before it."""
    heading: str
    """In the table of `test`."""
    of_classes: Callable[[ClassScores], np.ndarray]
    """float64 [C] or [C, K]: the score is the mean of it all, that of a class the mean of its row."""


SCORES = (
    Score("precision", "P", lambda classes: classes.precision_C),
    Score("recall", "R", lambda classes: classes.recall_C),
    Score("mAP_0.5", "mAP@.5", lambda classes: classes.ap_CK[:, 0]),
    Score("mAP_0.5:0.95", "mAP@.5:.95", lambda classes: classes.ap_CK),
    Score("F1", "F1", lambda classes: classes.f1_C),
    Score("AR_0.5:0.95", "AR@.5:.95", lambda classes: classes.full_recall_CK),
)
"""In the order of the table's columns: those of YOLOv7 first."""

LOSSES = ("box", "obj", "cls")
"""Of a validation; in files `val_` stands before their names."""

YOLOV7_RESULTS = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95", *(f"val_{name}" for name in LOSSES))
"""What results.txt, the file of a study and evolve.txt hold of an evaluation, in this order for good."""


def headings() -> list[str]:
    return [score.heading for score in SCORES]


def mean_scores(classes: ClassScores) -> dict[str, float]:
    """Means over the classes, by name; zeros if there is no class."""
    if not len(classes.classes_C):
        return {score.name: 0.0 for score in SCORES}
    return {score.name: float(score.of_classes(classes).mean()) for score in SCORES}


def scores_by_class(classes: ClassScores) -> dict[str, np.ndarray]:
    """Name -> float64 [C]."""
    found = {score.name: score.of_classes(classes) for score in SCORES}
    return {name: values if values.ndim == 1 else values.mean(1) for name, values in found.items()}


def zero_scores() -> dict[str, float]:
    """What is written down of an epoch that was not validated, as YOLOv7 does."""
    return dict.fromkeys([*(score.name for score in SCORES), *YOLOV7_RESULTS], 0.0)


def fitness(*, map50: float, map50_95: float) -> float:
    """What a checkpoint is worth."""
    return 0.1 * map50 + 0.9 * map50_95


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the classes that occur in the labels, and the classes themselves."""

    num_images: int
    num_labels: int
    num_classes: int
    scores: Mapping[str, float]
    """By the names of `SCORES`."""
    classes: ClassScores
    confusion: np.ndarray | None = None
    """int64 [num_classes + 1, num_classes + 1], if it was asked for."""

    @property
    def precision(self) -> float:
        return self.scores["precision"]

    @property
    def recall(self) -> float:
        return self.scores["recall"]

    @property
    def map50(self) -> float:
        return self.scores["mAP_0.5"]

    @property
    def map50_95(self) -> float:
        return self.scores["mAP_0.5:0.95"]

    @property
    def fitness(self) -> float:
        return fitness(map50=self.map50, map50_95=self.map50_95)

    @property
    def maps(self) -> np.ndarray:
        """Mean AP of every class, float64 [num_classes]; the overall mean for a class without labels."""
        maps = np.full(self.num_classes, self.map50_95)
        maps[self.classes.classes_C] = self.classes.ap_CK.mean(1)
        return maps

    def per_class_ap(self, names: Sequence[str]) -> Mapping[str, Any]:
        """For a JSON file: {map50, map, per_class: {id: {ap50, ap, name}}}."""
        rows = zip(self.classes.classes_C.tolist(), self.classes.ap_CK, strict=True)
        per_class = {
            str(number): {"ap50": float(ap_K[0]), "ap": float(ap_K.mean()), "name": names[number]}
            for number, ap_K in rows
        }
        return {"map50": self.map50, "map": self.map50_95, "per_class": per_class}
