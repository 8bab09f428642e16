"""Results in windows while they are made: `--view-img`, where there is a display."""

import logging
import os
import queue
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

STOP_KEY = "q"


class Windows:
    """Pictures handed over from any thread, shown by the main one, as toolkits want it."""

    def __init__(self, cv2: Any) -> None:
        self._cv2 = cv2
        self._waiting: queue.SimpleQueue[tuple[str, np.ndarray]] = queue.SimpleQueue()
        self.stopped = False
        """Was `q` pressed?"""

    def put(self, name: str, image_HWC: np.ndarray) -> None:
        self._waiting.put((name, image_HWC))

    def show(self) -> None:
        """Show what waits; call it in the main thread."""
        while not self._waiting.empty():
            self._cv2.imshow(*self._waiting.get())
            self.stopped = self.stopped or self._cv2.waitKey(1) & 0xFF == ord(STOP_KEY)

    def close(self) -> None:
        self._cv2.destroyAllWindows()


def open_windows() -> Windows | None:
    """None, with one sentence in the log, where nothing can be shown."""
    import cv2

    reason = ""
    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        reason = "this machine has no display"
    else:
        try:
            cv2.imshow("flatout", np.zeros((1, 1, 3), np.uint8))
            cv2.destroyAllWindows()
        except cv2.error:
            reason = "this OpenCV was built without windows (pip install opencv-python has them)"
    if reason:
        logger.warning("--view-img: %s, so nothing is shown.", reason)
        return None
    return Windows(cv2)
