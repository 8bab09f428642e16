"""Evaluating a network on a data set: the loop that training and `test.py` share, and `test.py` itself.

batches -> network -> NMS -> matched to labels batch by batch -> Outcome: precision, recall, mAP, losses, milliseconds

Files:

    evaluate          `test.py`: weights and a data set in; a table, label files, JSON and plots out
    run               One pass of a network over a validation set: the loop, partial results of several ranks, plots
    tiles             Detection in whole images by tiles, for `detect`, `test` and the validation of a training
    validation_input  Batches for validation: letterboxed images of similar shapes, always in the same order
"""

from flatout.yolo.evaluate.evaluate import TestResult, test
from flatout.yolo.evaluate.run import Evaluate, Outcome, Speed

__all__ = ["Evaluate", "Outcome", "Speed", "TestResult", "test"]
