"""Non-maximum suppression, exactly as YOLOv7 does it, for a whole batch at once.

Files:

    greedy         Greedy suppression kernels: the choice of one, and the sweep kernel on the host
    greedy_triton  Greedy suppression on a CUDA device: one program per image, all images in one launch
    merge_tiles    Detections of the tiles of an image -> detections of the image: cut boxes are dropped or joined
    suppress       Non-maximum suppression of a whole batch, exactly as YOLOv7 does it
"""

from flatout.yolo.nms.suppress import Detections, NmsConfig, non_max_suppression

__all__ = ["Detections", "NmsConfig", "non_max_suppression"]
