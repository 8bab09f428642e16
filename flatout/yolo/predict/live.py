"""Several cameras and streams side by side: the newest frame of each, handed over as the network can take them."""

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Self

import numpy as np

from flatout.yolo.predict.frames import Frame, Origin, ReadFrame, Unreadable, given
from flatout.yolo.predict.stream import RETRY_S, Stream

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
