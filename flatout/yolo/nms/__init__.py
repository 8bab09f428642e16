"""Non-maximum suppression, exactly as YOLOv7 does it, for a whole batch at once.

Files:

    config         Which boxes are worth keeping
    detections     What a detector found in a batch: one row per box, images one behind the other
    greedy         Which kernel suppresses: ours on the host, ours on the GPU, or that of torchvision
    greedy_triton  Greedy suppression on a CUDA device
    suppress       Non-maximum suppression of a whole batch
"""

from flatout.yolo.nms.config import NmsConfig
from flatout.yolo.nms.detections import Detections
from flatout.yolo.nms.suppress import non_max_suppression

__all__ = ["Detections", "NmsConfig", "non_max_suppression"]
