"""Precision, recall and average precision of every class, the scores of an evaluation by name, and fitness.

    all detections --sorted on their own device--> scores, and the few that are correct --host--> curves of each class

`SCORES` lists all scores; the table of `test`, results.csv, log.jsonl, callbacks and loggers follow from it. NumPy
computes them on the host in double precision, once per evaluation.

Dimension key:  D detections   L labels   C classes that occur in the labels   G all classes   K overlap thresholds
                H hits: detections that are correct at any threshold   X points of a curve   P recalls of an AP
                n detections of one class   h its hits
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.boxes import best_first, positions

# Detections in the order in which curves need them


class RankedDetections(NamedTuple):
    """Detections by class, best first in each class; arrays on the host."""

    score_D: np.ndarray
    end_G: np.ndarray
    """int64: where each class ends."""
    hit_H: np.ndarray
    """int64: positions of the hits, ascending."""
    correct_HK: np.ndarray


def rank_detections(correct_DK: Tensor, score_D: Tensor, class_D: Tensor) -> RankedDetections:
    """Sort detections on their device; of equal scores the first is the better one.

    Few detections are correct, and the others are only counted: their rows of `correct_DK` stay on the device.
    """
    num_classes = int(class_D.max()) + 1 if len(class_D) else 0
    order_D = best_first(class_D, score_D.float(), max(1, num_classes))
    hit_H = positions(correct_DK.any(1).index_select(0, order_D))
    correct_HK = correct_DK.index_select(0, order_D.index_select(0, hit_H))
    every_G = torch.arange(num_classes, device=class_D.device)
    end_G = torch.searchsorted(class_D.index_select(0, order_D), every_G, right=True)
    columns = (score_D.index_select(0, order_D), end_G, hit_H, correct_HK)
    return RankedDetections(*(column.cpu().numpy() for column in columns))


# Scores of classes

CURVE_POINTS = 1000
RECALL_POINTS = np.linspace(0, 1, 101)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Curves of each class at an IoU of 0.5, each at X evenly spaced points from 0 to 1."""

    precision_CX: np.ndarray
    recall_CX: np.ndarray
    f1_CX: np.ndarray
    """These three as functions of the confidence."""

    precision_at_recall_CX: np.ndarray
    """As a function of the recall."""

    @property
    def best_point(self) -> int:
        """Index of the confidence at which the mean F1 of all classes is largest (the first if there are several)."""
        return int(self.f1_CX.mean(0).argmax()) if len(self.f1_CX) else 0


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """Scores of the classes that occur in the labels, ascending."""

    classes_C: np.ndarray
    num_labels_C: np.ndarray
    ap_CK: np.ndarray
    """Average precision at each overlap threshold."""

    full_recall_CK: np.ndarray
    """Fraction of the labels that any detection matches, at any confidence, at each overlap threshold."""

    curves: Curves

    @property
    def precision_C(self) -> np.ndarray:
        """Precision at the confidence that is best for all classes together."""
        return np.asarray(self.curves.precision_CX[:, self.curves.best_point])

    @property
    def recall_C(self) -> np.ndarray:
        return np.asarray(self.curves.recall_CX[:, self.curves.best_point])

    @property
    def f1_C(self) -> np.ndarray:
        return np.asarray(self.curves.f1_CX[:, self.curves.best_point])


def score_classes(
    correct_DK: np.ndarray,
    score_D: np.ndarray,
    class_D: np.ndarray,
    label_class_L: np.ndarray,
    *,
    v5_metric: bool = False,
) -> ClassScores:
    """Scores from all detections of an evaluation, in any order; equal scores are counted in the order given.

    A class without detections has scores of 0 and is included; a class without labels is not.
    """
    detections = (torch.from_numpy(column) for column in (correct_DK, score_D, class_D.astype(np.int64)))
    return score_ranked(rank_detections(*detections), label_class_L, v5_metric=v5_metric)


def score_ranked(found: RankedDetections, label_class_L: np.ndarray, *, v5_metric: bool = False) -> ClassScores:
    """`score_classes` for detections that are sorted already."""
    classes_C, num_labels_C = np.unique(label_class_L.astype(np.int64), return_counts=True)
    ap_CK, full_recall_CK = np.zeros((2, len(classes_C), found.correct_HK.shape[1]))
    curves_C3X = np.zeros((len(classes_C), 3, CURVE_POINTS))
    end_G = found.end_G.tolist()
    for index, (number, num_labels) in enumerate(zip(classes_C.tolist(), num_labels_C, strict=True)):
        if number >= len(end_G):
            break  # no detection has this class or a later one
        begin, end = end_G[number - 1] if number else 0, end_G[number]
        if begin < end:
            hits = slice(*np.searchsorted(found.hit_H, (begin, end)))
            hit_h, correct_hK = found.hit_H[hits] - begin, found.correct_HK[hits]
            scores = _score_class(found.score_D[begin:end], hit_h, correct_hK, num_labels, v5_metric)
            ap_CK[index], curves_C3X[index] = scores
            full_recall_CK[index] = correct_hK.sum(0) / num_labels
    precision_CX, recall_CX, precision_at_recall_CX = curves_C3X.swapaxes(0, 1)
    curves = Curves(
        precision_CX=precision_CX,
        recall_CX=recall_CX,
        f1_CX=2 * precision_CX * recall_CX / (precision_CX + recall_CX + 1e-16),
        precision_at_recall_CX=precision_at_recall_CX,
    )
    return ClassScores(
        classes_C=classes_C, num_labels_C=num_labels_C, ap_CK=ap_CK, full_recall_CK=full_recall_CK, curves=curves
    )


def _score_class(
    score_n: np.ndarray, hit_h: np.ndarray, correct_hK: np.ndarray, num_labels: int, v5_metric: bool
) -> tuple[np.ndarray, np.ndarray]:
    """AP [K], and [3, X]: precision and recall over confidence, precision over recall; best detections first."""
    corner = _corners(hit_h, len(score_n))
    so_far_hK = np.vstack((np.zeros(correct_hK.shape[1]), correct_hK.cumsum(0, dtype=np.float64)))
    true_Kn = np.ascontiguousarray(so_far_hK[np.searchsorted(hit_h, corner, side="right")].T)
    recall_Kn, precision_Kn = _envelope(true_Kn / (num_labels + 1e-16), true_Kn / (corner + 1), v5_metric)
    points_X = np.linspace(0, 1, CURVE_POINTS)
    true_n = np.zeros(len(score_n))
    true_n[hit_h] = correct_hK[:, 0]
    true_n = true_n.cumsum()
    # Above the highest confidence there are no detections: precision is 1 and recall is 0.
    precision_X = np.interp(-points_X, -score_n, true_n / np.arange(1, len(true_n) + 1), left=1)
    recall_X = np.interp(-points_X, -score_n, true_n / (num_labels + 1e-16), left=0)
    precision_at_recall_X = np.interp(points_X, recall_Kn[0], precision_Kn[0])
    return _area(recall_Kn, precision_Kn), np.stack((precision_X, recall_X, precision_at_recall_X))


def _corners(hit_h: np.ndarray, num: int) -> np.ndarray:
    """Corners of precision over recall among `num` detections: hits, those just before one, and the last.

    Between two hits recall is constant and precision falls, so the others do not change the envelope.
    """
    is_corner_n = np.zeros(num, bool)
    is_corner_n[hit_h] = True
    is_corner_n[:-1] |= is_corner_n[1:]
    is_corner_n[-1] = True
    return np.flatnonzero(is_corner_n)


def average_precision(recall_n: np.ndarray, precision_n: np.ndarray, *, v5_metric: bool = False) -> float:
    """Area under the envelope of a curve, from 101 points; `v5_metric` extends the curve to a recall of 1.

    `recall_n` must be ascending. Otherwise the curve ends 0.01 after the last recall, as in YOLOv7.
    """
    return float(_area(*_envelope(recall_n[None], precision_n[None], v5_metric))[0])


def _area(recall_Kn: np.ndarray, precision_Kn: np.ndarray) -> np.ndarray:
    """Area under each curve, [K]."""
    height_KP = np.array([np.interp(RECALL_POINTS, *curve) for curve in zip(recall_Kn, precision_Kn, strict=True)])
    return np.asarray(((height_KP[:, 1:] + height_KP[:, :-1]) * np.diff(RECALL_POINTS)).sum(1) / 2)


def _envelope(recall_Kn: np.ndarray, precision_Kn: np.ndarray, v5_metric: bool) -> tuple[np.ndarray, np.ndarray]:
    """The curves with both end points, and with precision that does not rise with recall."""
    one_K1 = np.ones((len(recall_Kn), 1))
    end_K1 = one_K1 if v5_metric else recall_Kn[:, -1:] + 0.01
    precision = np.concatenate((one_K1, precision_Kn, 0 * one_K1), 1)
    falling = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
    return np.concatenate((0 * one_K1, recall_Kn, end_K1), 1), falling


# Scores by name


class Score(NamedTuple):
    """One score of an evaluation."""

    name: str
    """Name in files; loggers prefix it with `metrics/`."""
    heading: str
    """Column heading in the table of `test`."""
    of_classes: Callable[[ClassScores], np.ndarray]
    """float64 [C] or [C, K]: the score is the mean of all values, the score of a class the mean of its row."""


SCORES = (
    Score("precision", "P", lambda classes: classes.precision_C),
    Score("recall", "R", lambda classes: classes.recall_C),
    Score("mAP_0.5", "mAP@.5", lambda classes: classes.ap_CK[:, 0]),
    Score("mAP_0.5:0.95", "mAP@.5:.95", lambda classes: classes.ap_CK),
    Score("F1", "F1", lambda classes: classes.f1_C),
    Score("AR_0.5:0.95", "AR@.5:.95", lambda classes: classes.full_recall_CK),
)
"""In the order of the table's columns, those of YOLOv7 first."""

LOSSES = ("box", "obj", "cls")
"""Losses of a validation; in files their names are prefixed with `val_`."""

YOLOV7_LOSSES = ("box", "obj", "cls", "total")
YOLOV7_RESULTS = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95", "val_box", "val_obj", "val_cls")
"""Losses of a training in results.txt, and values of an evaluation there, in the file of a study and in evolve.txt.
Written out, because other programs read them by position: a further loss must not add a column."""


def headings() -> list[str]:
    return [score.heading for score in SCORES]


def mean_scores(classes: ClassScores) -> dict[str, float]:
    """Means over the classes, by name; zeros if there is no class."""
    if not len(classes.classes_C):
        return {score.name: 0.0 for score in SCORES}
    return {score.name: float(score.of_classes(classes).mean()) for score in SCORES}


def scores_by_class(classes: ClassScores) -> dict[str, np.ndarray]:
    """Scores of every class by name, float64 [C]."""
    found = {score.name: score.of_classes(classes) for score in SCORES}
    return {name: values if values.ndim == 1 else values.mean(1) for name, values in found.items()}


def zero_scores() -> dict[str, float]:
    """Scores and losses of an epoch that was not validated, as YOLOv7 writes them."""
    return dict.fromkeys([*(score.name for score in SCORES), *YOLOV7_RESULTS], 0.0)


def fitness(*, map50: float, map50_95: float) -> float:
    """The number by which epochs are compared: a tenth of mAP@.5 and nine tenths of mAP@.5:.95."""
    return 0.1 * map50 + 0.9 * map50_95


# The result of an evaluation


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Mean scores over the classes that occur in the labels, and the scores of each class."""

    num_images: int
    num_labels: int
    num_classes: int
    scores: Mapping[str, float]
    """Means by the names of `SCORES`."""
    classes: ClassScores
    confusion: np.ndarray | None = None
    """int64 [num_classes + 1, num_classes + 1], if it was requested."""

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
        """AP of every class, for a JSON file: {map50, map, per_class: {id: {ap50, ap, name}}}."""
        rows = zip(self.classes.classes_C.tolist(), self.classes.ap_CK, strict=True)
        per_class = {
            str(number): {"ap50": float(ap_K[0]), "ap": float(ap_K.mean()), "name": names[number]}
            for number, ap_K in rows
        }
        return {"map50": self.map50, "map": self.map50_95, "per_class": per_class}
