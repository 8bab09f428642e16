"""Non-maximum suppression, exactly as YOLOv7 does it, for a whole batch at once."""

from flatout.yolo.nms.config import NmsConfig
from flatout.yolo.nms.detections import Detections
from flatout.yolo.nms.suppress import non_max_suppression

__all__ = ["Detections", "NmsConfig", "non_max_suppression"]
