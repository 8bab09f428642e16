"""How good are the detections? Matching, average precision, confusion, fitness, COCO.

Files:

    coco            Detections in the format of the COCO API
    confusion_file  A confusion matrix as numbers in a file: what `test.py` writes, and what others write
    evaluation      The result of an evaluation
    match           Which detections are right, and what is taken for what: each label is found at most once
"""

from flatout.yolo.metrics.evaluation import (
    LOSSES,
    SCORES,
    YOLOV7_RESULTS,
    ClassScores,
    Curves,
    Evaluation,
    Score,
    average_precision,
    fitness,
    headings,
    score_classes,
    scores_by_class,
    zero_scores,
)
from flatout.yolo.metrics.match import (
    IOU_THRESHOLDS,
    ConfusionMatrix,
    Evaluator,
    Labels,
    Matches,
    labels_in_pictures,
    match_to_labels,
)

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
