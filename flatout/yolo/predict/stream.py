"""One camera or stream: a thread that reads it, keeps its newest frame, and mends lost connections.

stream --every 4th frame--> newest --taken when the network is free--> frame
"""

import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from flatout.errors import DataError
from flatout.yolo.predict.files import fps_of, num_frames_of

logger = logging.getLogger(__name__)

EVERY = 4
"""Of a live stream's frames, as in YOLOv7; the others are not decoded."""
RETRY_S = (0.5, 1.0, 2.0, 4.0)
"""Waits before each attempt to connect again; after the last the stream counts as ended."""
LIMIT_MS = 10_000
"""For opening, and for a frame to come."""
LEAVE_S = 1.0
"""So long a reader is waited for at the end."""


class Stream:
    """One camera or stream, read by a thread until it ends or `close()` is called."""

    def __init__(self, address: str, fresh: threading.Condition, retry_s: Sequence[float] = RETRY_S) -> None:
        """Opens it; `fresh` is notified of every new frame and of the end. DataError if it cannot be opened."""
        self.address = address
        self.shown = without_password(address)
        """What to call it in texts and file names."""
        self._fresh, self._retry_s = fresh, retry_s
        self._newest: np.ndarray | None = None
        self._closing = threading.Event()
        self.ended: str | None = None
        """Why there will be no more frames; None while there may be."""
        capture = open_capture(address)
        if not capture.isOpened():
            raise DataError(f"--source {self.shown}: {_cannot_open(address)}")
        self.fps = fps_of(capture) or 30.0
        # A file behind a URL has an end: all of its frames are wanted, and reaching the end is no fault.
        self._is_endless = num_frames_of(capture) == 0
        self._thread = threading.Thread(target=self._read, args=(capture,), name="flatout-stream", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Did it end, and was its last frame taken?"""
        return self.ended is not None and self._newest is None

    def take(self) -> np.ndarray | None:
        """The newest frame, once; call it with the condition held."""
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        self._closing.set()
        with self._fresh:
            self._fresh.notify_all()
        # A thread that waits for a silent stream ends by itself, when OpenCV's limit is reached.
        self._thread.join(timeout=LEAVE_S)

    def _read(self, capture: Any) -> None:
        seen = 0
        while not self._closing.is_set():
            if not capture.grab():
                capture.release()
                capture = self._mended() if self._is_endless else None
                if capture is None:
                    break
                continue
            seen += 1
            if self._is_endless and seen % EVERY:
                continue
            there, image = capture.retrieve()
            if there:
                self._hand_over(image)
        if capture is not None:
            capture.release()
        self._end()

    def _hand_over(self, image: np.ndarray) -> None:
        with self._fresh:
            # A file behind a URL waits until its frame was taken; a live picture that nobody took is replaced.
            while not self._is_endless and self._newest is not None and not self._closing.is_set():
                self._fresh.wait(timeout=1.0)
            self._newest = image
            self._fresh.notify_all()

    def _mended(self) -> Any:
        """A new connection that gives frames; None if there is none to be had."""
        for attempt, wait_s in enumerate(self._retry_s, start=1):
            logger.warning(
                "%s: no frame came; connecting again in %.1f s (%d of %d).",
                self.shown, wait_s, attempt, len(self._retry_s),
            )  # fmt: skip
            if self._closing.wait(wait_s):
                return None
            capture = open_capture(self.address)
            if capture.isOpened() and capture.grab():
                logger.info("%s: connected again.", self.shown)
                return capture
            capture.release()
        return None

    def _end(self) -> None:
        with self._fresh:
            lost = self._is_endless and not self._closing.is_set()
            self.ended = f"the stream was lost, and {len(self._retry_s)} attempts to get it back failed" if lost else ""
            self._fresh.notify_all()


def without_password(address: str) -> str:
    """rtsp://user:secret@camera/1 -> rtsp://camera/1"""
    return re.sub(r"//[^/@]*@", "//", address)


def open_capture(address: str) -> Any:
    """A camera by its number, else a stream, with limits so that nothing waits for ever."""
    import cv2

    if address.isdecimal():
        return cv2.VideoCapture(int(address))
    limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, LIMIT_MS, cv2.CAP_PROP_READ_TIMEOUT_MSEC, LIMIT_MS]
    return cv2.VideoCapture(address, cv2.CAP_FFMPEG, limits)


def _cannot_open(address: str) -> str:
    if address.isdecimal():
        return f"camera {address} cannot be opened. Is /dev/video{address} there, and may you read it?"
    return "the stream cannot be opened. Check the address, and that this machine can reach it."
