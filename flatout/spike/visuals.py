"""Writes frames: images, images side by side, and a short video.

Dimension key:  H W frame
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

logger = logging.getLogger(__name__)


def as_bytes(frame_3HW: Tensor) -> np.ndarray:
    """Convert a frame with values in 0..1 to uint8 RGB [H, W, 3]. Waits for the device."""
    return (frame_3HW.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()


def write_image(path: Path, rgb_HW3: np.ndarray) -> None:
    """Write an image in the format that the file name implies, such as PNG."""
    import cv2

    path.parent.mkdir(parents=True, exist_ok=True)
    if not cv2.imwrite(str(path), cv2.cvtColor(np.ascontiguousarray(rgb_HW3), cv2.COLOR_RGB2BGR)):
        raise OSError(f"{path} could not be written.")


def side_by_side(frames_HW3: Sequence[np.ndarray], gap_px: int = 4) -> np.ndarray:
    """Frames in a row, separated by white gaps."""
    gap = np.full((frames_HW3[0].shape[0], gap_px, 3), 255, np.uint8)
    parts = [part for frame in frames_HW3 for part in (gap, frame)][1:]
    return np.concatenate(parts, axis=1)


def write_video(path: Path, frames_HW3: Sequence[np.ndarray], fps: float = 12.0) -> bool:
    """Write MJPEG in an .avi file, which needs no extra codec; warns and returns False if OpenCV cannot write it."""
    import cv2

    height, width = frames_HW3[0].shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), fps, (width, height))
    if not writer.isOpened():
        logger.warning("%s: OpenCV cannot write videos on this machine. The frames were written as images.", path)
        return False
    for frame in frames_HW3:
        writer.write(cv2.cvtColor(np.ascontiguousarray(frame), cv2.COLOR_RGB2BGR))
    writer.release()
    return True
