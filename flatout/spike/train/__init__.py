"""Training a deblurring network: the whole of `flatout spike train`.

config -> clips, loader plan, network -> job + loop of flatout.engine -> checkpoints, metrics, pictures
"""

from flatout.spike.train.options import TrainOptions
from flatout.spike.train.whole import TrainResult, train

__all__ = ["TrainOptions", "TrainResult", "train"]
