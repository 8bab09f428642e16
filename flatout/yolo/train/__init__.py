"""Training a detector: the whole of `train.py`.

options -> prepared (network, data, device) -> job + loop of flatout.engine -> weights, results, pictures
"""

from flatout.yolo.train.whole import TrainResult, train

__all__ = ["TrainResult", "train"]
