"""The result of an evaluation, and the one number by which checkpoints are compared.

Dimension key:  C classes that occur in the labels   K overlap thresholds
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.yolo.metrics.average_precision import ClassScores


def fitness(*, map50: float, map50_95: float) -> float:
    """What a checkpoint is worth."""
    return 0.1 * map50 + 0.9 * map50_95


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the classes that occur in the labels, and the classes themselves."""

    num_images: int
    num_labels: int
    num_classes: int
    precision: float
    recall: float
    map50: float
    map50_95: float
    classes: ClassScores
    confusion: np.ndarray | None = None
    """int64 [num_classes + 1, num_classes + 1], if it was asked for."""

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
