"""How good is a network on a data set? The loop that training and `test.py` share, and the whole of `test.py`.

batches -> network -> NMS -> matched as they come -> Outcome: precision, recall, mAP, losses, milliseconds
"""

from flatout.yolo.evaluate.run import Evaluate, Outcome, Speed
from flatout.yolo.evaluate.whole import TestResult, test

__all__ = ["Evaluate", "Outcome", "Speed", "TestResult", "test"]
