"""What `--source` means, and pictures and videos in files, one frame after the other.

A picture on its way through prediction: where it comes from, its pixels, and how it lies in the network's input.

Dimension key:  H W picture   h w input
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.feed import DecodeError
from flatout.images import read_image
from flatout.yolo.data.find import SUFFIXES, is_image_name, read_list
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


# What does `--source` mean? A text in; files to look at, or streams to watch, out.

VIDEO_SUFFIXES = frozenset({"mov", "avi", "mp4", "mpg", "mpeg", "m4v", "wmv", "mkv"})
STREAM_STARTS = ("rtsp://", "rtmp://", "http://", "https://")
LIST_SUFFIX = ".txt"


class Files(NamedTuple):
    """Pictures come first, then videos, as in YOLOv7."""

    pictures: list[str]
    videos: list[str]

    def __len__(self) -> int:
        return len(self.pictures) + len(self.videos)


class Streams(NamedTuple):
    """Cameras by number and streams by URL, watched side by side."""

    addresses: list[str]
    listed: bool
    """They stand in a list. YOLOv7 writes no video of such streams."""


def find_sources(text: str) -> Files | Streams:
    """Files in a folder (not below it), of a pattern with *, of a list, a single one; or cameras and streams.

    ConfigError where there is no such thing, DataError where there is nothing in it to look at.
    """
    if is_live(text):
        return Streams([text], listed=False)
    if text.lower().endswith(LIST_SUFFIX) and os.path.isfile(text):
        return _of_list(text)
    if "*" in text:
        found = _sorted_out(sorted(glob.glob(text, recursive=True)))
    elif os.path.isdir(text):
        found = _sorted_out(sorted(entry.path for entry in os.scandir(text) if not entry.name.startswith(".")))
    elif os.path.exists(text):
        found = _sorted_out([text])
    else:
        raise ConfigError(
            f"--source {text}: no such file or folder. Name a picture, a folder, a pattern in quotes ('shots/*.jpg'), "
            "a video, a .txt list, the number of a camera or a URL."
        )
    if not len(found):
        raise DataError(f"--source {text}: {_nothing(text)} Pictures end in {_endings()}.")
    return found


def is_live(text: str) -> bool:
    """Is it a camera or a stream, which has no end of its own?"""
    return text.isdecimal() or text.lower().startswith(STREAM_STARTS)


def _of_list(path: str) -> Files | Streams:
    lines = [line.strip() for line in read_list(path) if line.strip()]
    if not lines:
        raise DataError(f"--source {path}: an empty list. Write a picture, a video or a stream per line.")
    if any(map(is_live, lines)):
        return Streams(lines, listed=True)
    found = _sorted_out(lines, must_exist=False)
    if not len(found):
        raise DataError(f"--source {path}: no line of it names a picture or a video. Pictures end in {_endings()}.")
    return found


def _sorted_out(paths: Iterable[str], *, must_exist: bool = True) -> Files:
    """By their endings; a file of a list that does not exist is told later, with all others that cannot be read."""
    files = [path for path in paths if not must_exist or os.path.isfile(path)]
    return Files([path for path in files if is_image_name(path)], [path for path in files if is_video_name(path)])


def is_video_name(path: str) -> bool:
    return path.rpartition(".")[2].lower() in VIDEO_SUFFIXES


def _nothing(text: str) -> str:
    if "*" in text:
        return "no picture and no video has such a name."
    return "no pictures and no videos in this folder." if os.path.isdir(text) else "neither a picture nor a video."


def _endings() -> str:
    return f"{', '.join(sorted(SUFFIXES))}; videos in {', '.join(sorted(VIDEO_SUFFIXES))}"


ENOUGH = 0.9
"""Of the frames that a video's header announces: headers estimate, and a video with fewer was cut off."""


def frames_of(files: Files) -> Iterator[ReadFrame]:
    """A call per frame. Pictures are decoded by the calls, side by side; videos while they are asked for, in order."""
    total = len(files)
    for number, path in enumerate(files.pictures):
        yield partial(read_frame, Origin(path, "image", number, total))
    for number, path in enumerate(files.videos, start=len(files.pictures)):
        yield from video_frames(Origin(path, "video", number, total))


def read_frame(origin: Origin) -> Frame | Unreadable:
    """The picture of a file."""
    try:
        return Frame(read_image(origin.path), origin)
    except (OSError, DecodeError) as error:
        return Unreadable(origin.path, getattr(error, "strerror", None) or str(error))


def video_frames(origin: Origin) -> Iterator[ReadFrame]:
    """Every frame of a video; one that cannot be opened or that ends early is an `Unreadable` at the end."""
    if not _can_be_named(origin.path):
        yield partial(given, Unreadable(origin.path, "OpenCV opens no video whose name is not UTF-8"))
        return
    capture = _open(origin.path)
    seen = 0
    num_frames, fps = num_frames_of(capture), fps_of(capture)
    try:
        while (image := _next_image(capture)) is not None:
            seen += 1
            frame = Frame(image, origin._replace(frame=seen, num_frames=num_frames, fps=fps))
            yield partial(given, frame)
    finally:
        capture.release()
    if not seen:
        yield partial(given, Unreadable(origin.path, "not a video that can be decoded: damaged, or cut off"))
    elif seen < ENOUGH * num_frames:
        yield partial(given, Unreadable(origin.path, f"ends after {seen} of {num_frames} frames", partly=True))


def count_frames(files: Files) -> int:
    """Of all files together, as the headers of the videos say; pictures count as one."""
    count = len(files.pictures)
    for path in filter(_can_be_named, files.videos):
        capture = _open(path)
        count += max(1, num_frames_of(capture))
        capture.release()
    return count


def num_frames_of(capture: Any) -> int:
    """As the header says; 0 for what has no end."""
    import cv2

    return max(0, int(capture.get(cv2.CAP_PROP_FRAME_COUNT)))


def fps_of(capture: Any) -> float:
    """Frames per second; 0 where the header says nothing sensible."""
    import cv2

    rate = float(capture.get(cv2.CAP_PROP_FPS))
    return rate if 0 < rate < 1000 else 0.0


def _can_be_named(path: str) -> bool:
    """OpenCV takes the process down if it is given another name."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open(path: str) -> Any:
    import cv2

    return cv2.VideoCapture(path)


def _next_image(capture: Any) -> Any:
    """uint8 [H, W, 3], BGR, an array of its own; None at the end."""
    there, image = capture.read()
    return image if there else None
