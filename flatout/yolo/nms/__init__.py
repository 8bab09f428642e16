"""Non-maximum suppression, exactly as YOLOv7 does it, for a whole batch at once.

Files:

    greedy         Which kernel suppresses: ours on the host, ours on the GPU, or that of torchvision
    greedy_triton  Greedy suppression on a CUDA device
    suppress       Non-maximum suppression of a whole batch
"""

from flatout.yolo.nms.suppress import Detections, NmsConfig, non_max_suppression

__all__ = ["Detections", "NmsConfig", "non_max_suppression"]
