"""How good are the detections? Matching, average precision, confusion, fitness, COCO.

Files:

    average_precision  From right and wrong detections to precision, recall and average precision of every class
    coco               Detections in the format of the COCO API
    confusion_file     A confusion matrix as numbers in a file: what `test.py` writes, and what others write
    evaluation         The result of an evaluation
    match              Which detections are right, and what is taken for what: each label is found at most once
    stream             Evaluation while the detector runs
"""

from flatout.yolo.metrics.average_precision import ClassScores, Curves, average_precision, score_classes
from flatout.yolo.metrics.evaluation import (
    LOSSES,
    SCORES,
    YOLOV7_RESULTS,
    Evaluation,
    Score,
    fitness,
    headings,
    scores_by_class,
    zero_scores,
)
from flatout.yolo.metrics.match import IOU_THRESHOLDS, ConfusionMatrix, Labels, labels_in_pictures, match_to_labels
from flatout.yolo.metrics.stream import Evaluator, Matches

__all__ = [
    "IOU_THRESHOLDS",
    "LOSSES",
    "SCORES",
    "YOLOV7_RESULTS",
    "ClassScores",
    "ConfusionMatrix",
    "Curves",
    "Evaluation",
    "Evaluator",
    "Labels",
    "Matches",
    "Score",
    "average_precision",
    "fitness",
    "headings",
    "labels_in_pictures",
    "match_to_labels",
    "score_classes",
    "scores_by_class",
    "zero_scores",
]
