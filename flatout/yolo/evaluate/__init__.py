"""How good is a network on a data set? The loop that training and `test.py` share, and the whole of `test.py`.

batches -> network -> NMS -> matched as they come -> Outcome: precision, recall, mAP, losses, milliseconds

Files:

    evaluate          The whole of `test.py`: weights and a data set in; a table, label files, JSON and charts out
    run               One pass of a network over a validation set
    validation_input  Pictures for validation
"""

from flatout.yolo.evaluate.evaluate import TestResult, test
from flatout.yolo.evaluate.run import Evaluate, Outcome, Speed

__all__ = ["Evaluate", "Outcome", "Speed", "TestResult", "test"]
