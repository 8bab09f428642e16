"""One camera or stream: a thread that reads it, keeps its newest frame, and mends lost connections.

stream --every 4th frame--> newest --taken when the network is free--> frame
"""

import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from flatout.errors import DataError
from flatout.yolo.predict.files import Frame, Origin, ReadFrame, Unreadable, fps_of, given, num_frames_of

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


# Several cameras and streams side by side: the newest frame of each, handed over as the network can take them.

PATIENCE_S = 1.0
"""After so long without a frame, look whether there is anything left to wait for."""


class LiveFrames:
    """Frames of several streams side by side, always the newest. A context manager."""

    def __init__(self, addresses: Sequence[str], retry_s: Sequence[float] = RETRY_S) -> None:
        """DataError if one of them cannot be opened."""
        self._fresh = threading.Condition()
        self._closed = False
        self.streams: list[Stream] = []
        try:
            for address in addresses:
                self.streams.append(Stream(address, self._fresh, retry_s))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[ReadFrame]:
        """A call per frame, until all streams have ended; what a stream ended with comes as `Unreadable`."""
        count = [0] * len(self.streams)
        going = set(range(len(self.streams)))
        while going and not self._closed:
            for number, image in self._newest(going):
                origin = self._origin(number, count[number])
                count[number] += 1
                yield partial(given, Frame(image, origin))
            for number in [number for number in going if self.streams[number].is_over]:
                going.discard(number)
                if reason := self.streams[number].ended:
                    yield partial(given, Unreadable(self.streams[number].shown, reason, partly=True))

    def close(self) -> None:
        self._closed = True
        for stream in self.streams:
            stream.close()

    def _newest(self, going: set[int]) -> list[tuple[int, np.ndarray]]:
        """One frame of each stream that has a new one; waits for the first, but not for ever."""
        deadline_s = time.monotonic() + PATIENCE_S
        with self._fresh:
            while True:
                images = {number: self.streams[number].take() for number in sorted(going)}
                taken = [(number, image) for number, image in images.items() if image is not None]
                if taken or self._closed or any(self.streams[number].is_over for number in going):
                    self._fresh.notify_all()  # there is room for the next frame
                    return taken
                if not self._fresh.wait(timeout=max(0.0, deadline_s - time.monotonic())):
                    return []

    def _origin(self, number: int, frame: int) -> Origin:
        stream = self.streams[number]
        return Origin(stream.shown, "stream", number, len(self.streams), frame=frame, fps=stream.fps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
