"""Training a defect network: the whole of `flatout defect train`.

options -> images, recipe, network -> job + loop of flatout.engine -> weights, results, pictures
"""

from flatout.defect.train.whole import TrainResult, train

__all__ = ["TrainResult", "train"]
