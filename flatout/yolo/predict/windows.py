"""Results on the screen: windows of `--view-img`, and one image in a window or a notebook."""

import logging
import os
import queue
import sys
from typing import Any

import numpy as np

from flatout.errors import ResourceError
from flatout.yolo.predict.threads import Closing

logger = logging.getLogger(__name__)

STOP_KEY = "q"


class Windows(Closing):
    """Shows images in windows: any thread puts them, the main thread shows them, as GUI toolkits require."""

    def __init__(self, cv2: Any) -> None:
        self._cv2 = cv2
        self._waiting: queue.SimpleQueue[tuple[str, np.ndarray]] = queue.SimpleQueue()
        self.stopped = False
        """Whether `q` was pressed."""

    def put(self, name: str, image_HWC: np.ndarray) -> None:
        self._waiting.put((name, image_HWC))

    def show(self) -> None:
        """Show all waiting images; call it in the main thread."""
        while not self._waiting.empty():
            self._cv2.imshow(*self._waiting.get())
            self.stopped = self.stopped or self._cv2.waitKey(1) & 0xFF == ord(STOP_KEY)

    def close(self) -> None:
        self._cv2.destroyAllWindows()


def open_windows() -> Windows | None:
    """Windows, or None with a warning if nothing can be shown here."""
    import cv2

    if reason := _why_no_windows():
        logger.warning("--view-img: %s, so nothing is shown.", reason)
        return None
    return Windows(cv2)


def _why_no_windows() -> str:
    """Why nothing can be shown in windows here; empty if it can."""
    import cv2

    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        return "this machine has no display"
    try:
        cv2.imshow("flatout", np.zeros((1, 1, 3), np.uint8))
        cv2.destroyAllWindows()
    except cv2.error:
        return "this OpenCV was built without windows (to get them: pip install opencv-python)"
    return ""


def show_image(name: str, image_HWC: np.ndarray) -> None:
    """Show an image below the cell of a notebook, else in a window until a key is pressed; ResourceError if neither
    is possible."""
    import cv2

    if _is_notebook():
        from IPython.display import Image, display

        display(Image(cv2.imencode(".png", image_HWC)[1].tobytes()))
        return
    if reason := _why_no_windows():
        raise ResourceError(f'show(): {reason}. Write a file instead: result.save("found.jpg")')
    cv2.imshow(name, image_HWC)
    cv2.waitKey(0)
    cv2.destroyAllWindows()


def _is_notebook() -> bool:
    """Whether this is a kernel of Jupyter; a terminal of IPython shows no images."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
