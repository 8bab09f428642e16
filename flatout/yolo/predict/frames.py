"""A picture on its way through prediction: where it comes from, its pixels, and how it lies in the network's input.

Dimension key:  H W picture   h w input
"""

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Literal, NamedTuple

import numpy as np

from flatout.yolo.data.letterbox import Fit, fit_tightly, letterbox

Kind = Literal["image", "video", "stream", "array"]


class Origin(NamedTuple):
    """Where a frame comes from."""

    path: str
    """Of the file, the stream's address, or a name such as `array 3`."""
    kind: Kind
    number: int
    """Of the file or stream, from 0."""
    total: int
    """Files or streams there are."""
    frame: int | None = None
    """Number within a video, from 1, or within a stream, from 0."""
    num_frames: int = 0
    """Of the video, as its header says; 0 if it does not."""
    fps: float = 0.0

    @property
    def stem(self) -> str:
        """Name of files about it, without ending; of a stream its address, with what no file name may hold left out."""
        if self.kind == "stream":
            return re.sub(r"[^\w.-]+", "_", self.path.rpartition("://")[2]).strip("_") or "stream"
        return PurePath(self.path).stem


class Frame(NamedTuple):
    """A picture in its own size."""

    image: np.ndarray
    """uint8 [H, W, 3], BGR."""
    origin: Origin


class Unreadable(NamedTuple):
    """What could not be looked at, or not to its end."""

    path: str
    reason: str
    partly: bool = False
    """Its beginning was looked at."""


class Prepared(NamedTuple):
    """A picture ready for the network."""

    frame: Frame
    input_3hw: np.ndarray
    """uint8, RGB, contiguous."""
    fitted: Fit


ReadFrame = Callable[[], Frame | Unreadable]
"""Gets a frame; called in a thread."""


def given(frame: Frame | Unreadable) -> Frame | Unreadable:
    """For a frame that is there already: `partial(given, frame)` is a `ReadFrame`."""
    return frame


class Prepare:
    """Fits pictures into the network's input, with bars as narrow as the stride allows."""

    def __init__(self, size: int, stride: int) -> None:
        self.size, self.stride = size, stride

    def __call__(self, frame: Frame) -> Prepared:
        image = frame.image
        fitted = fit_tightly((image.shape[0], image.shape[1]), (self.size, self.size), stride=self.stride)
        boxed_hw3 = letterbox(image, fitted)
        return Prepared(frame, np.ascontiguousarray(boxed_hw3[..., ::-1].transpose(2, 0, 1)), fitted)
