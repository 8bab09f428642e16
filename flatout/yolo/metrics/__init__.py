"""How good are the detections? Matching, average precision, confusion, fitness, COCO."""

from flatout.yolo.metrics.average_precision import ClassScores, Curves, average_precision, score_classes
from flatout.yolo.metrics.confusion import ConfusionMatrix
from flatout.yolo.metrics.evaluation import Evaluation, fitness
from flatout.yolo.metrics.match import IOU_THRESHOLDS, Labels, labels_in_pictures, match_to_labels
from flatout.yolo.metrics.stream import Evaluator, Matches

__all__ = [
    "IOU_THRESHOLDS",
    "ClassScores",
    "ConfusionMatrix",
    "Curves",
    "Evaluation",
    "Evaluator",
    "Labels",
    "Matches",
    "average_precision",
    "fitness",
    "labels_in_pictures",
    "match_to_labels",
    "score_classes",
]
