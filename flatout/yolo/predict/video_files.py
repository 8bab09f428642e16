"""Videos with boxes on them, written frame by frame. Every frame of a video goes through one writer, in order."""

from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import ResourceError

CODEC = "mp4v"
USUAL_FPS = 30.0


class VideoFiles:
    """Writers by file name. Not for several threads at once; `close()` may be called twice."""

    def __init__(self) -> None:
        self._writers: dict[Path, Any] = {}
        self._size_wh: dict[Path, tuple[int, int]] = {}

    def add(self, path: Path, image_HWC: np.ndarray, fps: float) -> None:
        """The next frame of a video; a frame of another size than the first is resized to it."""
        import cv2

        height, width = image_HWC.shape[:2]
        if path not in self._writers:
            self._writers[path] = _open(path, fps, (width, height))
            self._size_wh[path] = width, height
        if (width, height) != self._size_wh[path]:
            image_HWC = cv2.resize(image_HWC, self._size_wh[path])
        self._writers[path].write(image_HWC)

    def finish(self, path: Path) -> None:
        """No more frames of this one."""
        if path in self._writers:
            self._writers.pop(path).release()

    def close(self) -> None:
        for path in list(self._writers):
            self.finish(path)


def _open(path: Path, fps: float, size_wh: tuple[int, int]) -> Any:
    import cv2

    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*CODEC), fps or USUAL_FPS, size_wh)
    if not writer.isOpened():
        raise ResourceError(
            f"{path}: the video cannot be written. Is there room, and may you write there? Without videos: --nosave"
        )
    return writer
