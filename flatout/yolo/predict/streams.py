"""Cameras and streams: a thread reads each, keeps its newest frame, and reconnects.

stream --every 4th frame--> newest --taken when the network is free--> frame
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from flatout.errors import DataError
from flatout.yolo.predict.files import (
    Frame,
    Origin,
    ReadFrame,
    Unreadable,
    already_read,
    fps_of,
    num_frames_of,
    without_password,
)
from flatout.yolo.predict.threads import Closing

logger = logging.getLogger(__name__)

# One stream

EVERY = 4
"""Every fourth frame of a live stream is used, as in YOLOv7; the others are not decoded."""
RETRY_S = (0.5, 1.0, 2.0, 4.0)
"""Waits before each attempt to reconnect; after the last, the stream counts as ended."""
TIMEOUT_MS = 10_000
"""Timeout for opening a stream and for each frame."""
JOIN_S = 1.0
"""How long `close` waits for the reading thread."""


class Stream:
    """One camera or stream, read by a thread until it ends or `close()` is called."""

    def __init__(
        self,
        address: str,
        changed: threading.Condition,
        retry_s: Sequence[float] = RETRY_S,
        *,
        flag: str = "--source ",
    ) -> None:
        """Open the stream; notifies `changed` of every new frame and of the end.

        DataError, which begins with `flag`, if it cannot be opened.
        """
        self.address = address
        self.shown = without_password(address)
        """The address in messages and file names."""
        self._changed, self._retry_s = changed, retry_s
        self._newest: np.ndarray | None = None
        self._closing = threading.Event()
        self.ended: str | None = None
        """Why there will be no more frames; None while there may be."""
        capture = open_capture(address)
        if not capture.isOpened():
            raise DataError(f"{flag}{self.shown}: {_cannot_open(address)}")
        self.fps = fps_of(capture) or 30.0
        self.is_endless = num_frames_of(capture) == 0
        """False for a file behind a URL: all of its frames are wanted, and reaching the end is no error."""
        self._thread = threading.Thread(target=self._read, args=(capture,), name="flatout-stream", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended and its last frame was taken."""
        return self.ended is not None and self._newest is None

    def take(self) -> np.ndarray | None:
        """The newest frame, only once; call it with the condition held."""
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        # A thread that waits for a silent stream ends by itself, after OpenCV's timeout.
        self._thread.join(timeout=JOIN_S)

    def _read(self, capture: Any) -> None:
        seen = 0
        while not self._closing.is_set():
            if not capture.grab():
                capture.release()
                capture = self._reconnected() if self.is_endless else None
                if capture is None:
                    break
                continue
            seen += 1
            if self.is_endless and seen % EVERY:
                continue
            there, image = capture.retrieve()
            if there:
                self._publish(image)
        if capture is not None:
            capture.release()
        self._end()

    def _publish(self, image: np.ndarray) -> None:
        with self._changed:
            # A file behind a URL waits until its frame was taken; a live frame that was not taken is replaced.
            while not self.is_endless and self._newest is not None and not self._closing.is_set():
                self._changed.wait(timeout=1.0)
            self._newest = image
            self._changed.notify_all()

    def _reconnected(self) -> Any:
        """A new connection that delivers frames; None if all attempts fail."""
        for attempt, wait_s in enumerate(self._retry_s, start=1):
            logger.warning(
                "%s: no frame received; reconnecting in %.1f s (attempt %d of %d).",
                self.shown, wait_s, attempt, len(self._retry_s),
            )  # fmt: skip
            if self._closing.wait(wait_s):
                return None
            capture = open_capture(self.address)
            if capture.isOpened() and capture.grab():
                logger.info("%s: reconnected.", self.shown)
                return capture
            capture.release()
        return None

    def _end(self) -> None:
        with self._changed:
            lost = self.is_endless and not self._closing.is_set()
            self.ended = f"the stream was lost, and {len(self._retry_s)} attempts to reconnect failed" if lost else ""
            self._changed.notify_all()


def open_capture(address: str) -> Any:
    """Open a camera by its number, else a stream, with timeouts so that nothing waits forever."""
    import cv2

    if address.isdecimal():
        return cv2.VideoCapture(int(address))
    limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, TIMEOUT_MS, cv2.CAP_PROP_READ_TIMEOUT_MSEC, TIMEOUT_MS]
    return cv2.VideoCapture(address, cv2.CAP_FFMPEG, limits)


def _cannot_open(address: str) -> str:
    if address.isdecimal():
        return f"camera {address} cannot be opened. Check that /dev/video{address} exists and that you may read it."
    return "the stream cannot be opened. Check the address, and that this machine can reach it."


# Several streams

CHECK_S = 1.0
"""Seconds without a frame after which it is checked whether a stream is still open."""


class LiveFrames(Closing):
    """The newest frames of several streams, whenever the network can take them. A context manager."""

    def __init__(
        self,
        addresses: Sequence[str],
        retry_s: Sequence[float] = RETRY_S,
        *,
        flag: str = "--source ",
        only_one: bool = False,
    ) -> None:
        """DataError if one of them cannot be opened. `only_one`: one frame of each that has no end."""
        self._changed = threading.Condition()
        self._only_one = only_one
        self._closed = False
        self.streams: list[Stream] = []
        try:
            for address in addresses:
                self.streams.append(Stream(address, self._changed, retry_s, flag=flag))
        except BaseException:  # also on Ctrl-C: the streams that are open have threads
            self.close()
            raise

    def __iter__(self) -> Iterator[ReadFrame]:
        """A call per frame, until all streams have ended; a stream that was lost ends with an `Unreadable`."""
        count = [0] * len(self.streams)
        going = set(range(len(self.streams)))
        while going and not self._closed:
            for number, image in self._newest(going):
                origin = self._origin(number, count[number])
                count[number] += 1
                yield partial(already_read, Frame(image, origin))
                if self._only_one and self.streams[number].is_endless:
                    going.discard(number)
            for number in [number for number in going if self.streams[number].is_over]:
                going.discard(number)
                if reason := self.streams[number].ended:
                    yield partial(already_read, Unreadable(self.streams[number].shown, reason, partly=True))

    def close(self) -> None:
        self._closed = True
        for stream in self.streams:
            stream.close()

    def _newest(self, going: set[int]) -> list[tuple[int, np.ndarray]]:
        """One frame of each stream that has a new one; waits up to CHECK_S for the first."""
        deadline_s = time.monotonic() + CHECK_S
        with self._changed:
            while True:
                images = {number: self.streams[number].take() for number in sorted(going)}
                taken = [(number, image) for number, image in images.items() if image is not None]
                if taken or self._closed or any(self.streams[number].is_over for number in going):
                    self._changed.notify_all()  # there is room for the next frame
                    return taken
                if not self._changed.wait(timeout=max(0.0, deadline_s - time.monotonic())):
                    return []

    def _origin(self, number: int, frame: int) -> Origin:
        stream = self.streams[number]
        return Origin(stream.shown, "stream", number, len(self.streams), frame=frame, fps=stream.fps)
