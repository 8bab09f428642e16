"""Scores of detections: matching, average precision, confusion matrix, fitness, COCO AP.

Files:

    coco            COCO AP: detections in the format of the COCO API, the evaluators
    confusion_file  Files with a confusion matrix: the one that `test.py` writes, and other formats that are read
    evaluation      Precision, recall and average precision of every class, the scores of an evaluation by name
    match           Matching of detections with labels, and the evaluator that collects the matches of all batches
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.yolo.metrics.evaluation import (
        LOSSES,
        SCORES,
        YOLOV7_LOSSES,
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
        labels_in_images,
        match_to_labels,
    )

__getattr__, __dir__ = face(__name__)
