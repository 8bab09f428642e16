"""Detections as lines of a label file: `--save-txt`, `--save-conf`.

Dimension key:  n detections
"""

import numpy as np

from flatout.yolo.predict.result import Result


def txt_lines(result: Result, *, scores: bool) -> list[str]:
    """`class cx cy w h [score]` per detection, the least sure first, of boxes rounded to whole pixels and divided by
    the size of the picture: so YOLOv7's detect.py writes them."""
    height, width = result.image.shape[:2]
    low_n2, high_n2 = result.pixel_boxes[:, :2], result.pixel_boxes[:, 2:]
    box_n4 = np.concatenate(((low_n2 + high_n2) / 2, high_n2 - low_n2), 1).astype(np.float32)
    box_n4 /= np.array([width, height, width, height], np.float32)
    rows = zip(result.classes.tolist(), box_n4.tolist(), result.scores.tolist(), strict=True)
    lines = [
        " ".join(f"{number:g}" for number in (kind, *box, *((score,) if scores else ()))) for kind, box, score in rows
    ]
    return lines[::-1]
