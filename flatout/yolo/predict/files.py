"""What `--source` means; images and videos in files, frame by frame.

    text --find_sources--> Files --frames_of--> ReadFrame calls --> Frame --Prepare--> Prepared: the network's input

Dimension key:  H W image   h w input
"""

import base64
import glob
import os
import re
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from errno import EACCES, ENOENT
from functools import partial
from http.client import HTTPException
from itertools import filterfalse
from pathlib import PurePath
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.feed import DecodeError
from flatout.images import MAX_LARGE_PIXELS, decode_usable, read_image, read_large
from flatout.yolo.data.find import SUFFIXES, is_image_name, read_list
from flatout.yolo.data.letterbox import Fit, fit_tightly, letterbox

# Frames

Kind = Literal["image", "video", "stream", "array"]


class Origin(NamedTuple):
    """Where a frame comes from."""

    path: str
    """Path of the file, address of the stream, or a name such as `array 3`."""
    kind: Kind
    number: int
    """Index of the file or stream, from 0."""
    total: int
    """Number of files or streams; 0 if nobody knows it yet."""
    frame: int | None = None
    """Number within a video, from 1, or within a stream, from 0."""
    num_frames: int = 0
    """Frames of the video according to its header; 0 if unknown."""
    fps: float = 0.0

    @property
    def stem(self) -> str:
        """Name of output files, without ending; for a stream its address, without characters that file names forbid."""
        if self.kind == "stream":
            return re.sub(r"[^\w.-]+", "_", self.path.rpartition("://")[2]).strip("_") or "stream"
        return PurePath(self.path).stem


class Frame(NamedTuple):
    """An image in its own size."""

    image: np.ndarray
    """uint8 [H, W, 3], BGR."""
    origin: Origin


class Unreadable(NamedTuple):
    """A file or stream that could not be read, or not to its end."""

    path: str
    reason: str
    partly: bool = False
    """Whether its beginning was read."""


class Prepared(NamedTuple):
    """A frame ready for the network."""

    frame: Frame
    input_3hw: np.ndarray
    """uint8, RGB, contiguous."""
    fitted: Fit


ReadFrame = Callable[[], Frame | Unreadable]
"""Reads a frame; called in a thread."""


def already_read(frame: Frame | Unreadable) -> Frame | Unreadable:
    """Returns its argument: `partial(already_read, frame)` is a `ReadFrame`."""
    return frame


class Prepare:
    """Letterboxes frames to the network's input, with as little padding as the stride allows."""

    def __init__(self, size: int, stride: int) -> None:
        self.size, self.stride = size, stride

    def __call__(self, frame: Frame) -> Prepared:
        image = frame.image
        fitted = fit_tightly((image.shape[0], image.shape[1]), (self.size, self.size), stride=self.stride)
        boxed_hw3 = letterbox(image, fitted)
        return Prepared(frame, np.ascontiguousarray(boxed_hw3[..., ::-1].transpose(2, 0, 1)), fitted)


# `--source`

VIDEO_SUFFIXES = frozenset({"mov", "avi", "mp4", "mpg", "mpeg", "m4v", "wmv", "mkv"})
STREAM_STARTS = ("rtsp://", "rtmp://", "http://", "https://")
LIST_SUFFIX = ".txt"


class Files(NamedTuple):
    """Image and video files; images come first, as in YOLOv7."""

    images: list[str]
    videos: list[str]

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)


class Streams(NamedTuple):
    """Cameras by number and streams by URL, read in parallel."""

    addresses: list[str]
    listed: bool
    """Whether they come from a .txt list. YOLOv7 writes no video of such streams."""


def find_sources(text: str, *, allow_urls: bool = False, flag: str = "--source ") -> Files | Streams:
    """The files of a folder (not of its subfolders), a pattern, a list or a single path; or cameras and streams.

    `allow_urls` allows addresses of images, which are downloaded. ConfigError, which begins with `flag`, if there is no
    such file or folder, DataError if it contains no image and no video.
    """
    if is_live(text):
        return Streams([text], listed=False)
    if is_image_url(text):
        return Files([allowed(text, allow_urls)], [])
    if text.lower().endswith(LIST_SUFFIX) and os.path.isfile(text):
        return _from_list(text, allow_urls, flag)
    if is_pattern(text):
        found = _by_ending(sorted(glob.glob(text, recursive=True)))
    elif os.path.isdir(text):
        found = _by_ending(sorted(entry.path for entry in os.scandir(text) if not entry.name.startswith(".")))
    elif os.path.exists(text):
        found = _by_ending([text])
    else:
        raise ConfigError(
            f"{flag}{text or repr('')}: no such file or folder. Name an image, a folder, a pattern in quotes "
            "('shots/*.jpg'), a video, a .txt list, the number of a camera or a URL."
        )
    if not len(found):
        raise DataError(f"{flag}{text}: {_why_empty(text)} Supported: {_supported()}.")
    return found


def is_pattern(text: str) -> bool:
    """Whether it is a pattern, with * or, unless there is a file of that name, with ? or brackets."""
    return "*" in text or (glob.has_magic(text) and not os.path.exists(text))


def is_live(text: str) -> bool:
    """Whether it names a camera or a stream."""
    return text.isdecimal() or (text.lower().startswith(STREAM_STARTS) and not is_image_url(text))


def is_image_url(text: str) -> bool:
    """Whether it is the address of an image: http or https, with the ending of an image file."""
    return text.lower().startswith(("http://", "https://")) and is_image_name(urlsplit(text).path)


def allowed(url: str, allow_urls: bool) -> str:
    """The address of an image; ConfigError if it must not be downloaded."""
    if not allow_urls:
        raise ConfigError(
            f"{without_password(url)}: images are downloaded only if you allow it. Add --allow-urls; in Python: "
            "allow_urls=True."
        )
    return url


def without_password(address: str) -> str:
    """rtsp://user:secret@camera/1 -> rtsp://camera/1"""
    return re.sub(r"//[^/@]*@", "//", address)


def _from_list(path: str, allow_urls: bool, flag: str) -> Files | Streams:
    lines = [line.strip() for line in read_list(path) if line.strip()]
    if not lines:
        raise DataError(f"{flag}{path}: the list is empty. Write one image, video or stream per line.")
    if any(map(is_live, lines)):
        return Streams(lines, listed=True)
    urls = [allowed(line, allow_urls) for line in lines if is_image_url(line)]
    found = _by_ending([line for line in lines if line not in urls], must_exist=False)
    found.images.extend(urls)
    if not len(found):
        raise DataError(f"{flag}{path}: no line names an image or a video. Supported: {_supported()}.")
    return found


def _by_ending(paths: Iterable[str], *, must_exist: bool = True) -> Files:
    """Split paths by their endings; folders and pipes are no images, whatever their names.

    Missing files of a list, and links that lead nowhere, are kept: they are reported when they cannot be read.
    """
    files = [path for path in paths if not must_exist or os.path.isfile(path) or not os.path.exists(path)]
    return Files([path for path in files if is_image_name(path)], [path for path in files if is_video_name(path)])


def is_video_name(path: str) -> bool:
    return path.rpartition(".")[2].lower() in VIDEO_SUFFIXES


def _why_empty(text: str) -> str:
    if is_pattern(text):
        return "no image and no video matches."
    return "no images and no videos in this folder." if os.path.isdir(text) else "neither an image nor a video."


def _supported() -> str:
    return f"images {', '.join(sorted(SUFFIXES))}; videos {', '.join(sorted(VIDEO_SUFFIXES))}"


# Reading files

ENOUGH = 0.9
"""Share of the frames announced by a video's header below which it counts as cut off; headers are estimates."""


def frames_of(files: Files, *, large: bool = False) -> Iterator[ReadFrame]:
    """A call per frame. Images are decoded by the calls, in parallel; videos by this iterator, in order.

    `large` allows images of more than 100 megapixels (`flatout.images.read_large`).
    """
    total = len(files)
    for number, path in enumerate(files.images):
        yield partial(read_frame, Origin(path, "image", number, total), large=large)
    for number, path in enumerate(files.videos, start=len(files.images)):
        yield from video_frames(Origin(path, "video", number, total))


def read_frame(origin: Origin, *, large: bool = False) -> Frame | Unreadable:
    """Read an image file, or download it; for `large` see `frames_of`."""
    if is_image_url(origin.path):
        shown = origin._replace(path=without_password(origin.path))
        return decode_frame(shown, partial(download, origin.path), large=large)
    try:
        return Frame(read_large(origin.path) if large else read_image(origin.path), origin)
    except (OSError, DecodeError) as error:
        return Unreadable(origin.path, _reason(error))


def decode_frame(origin: Origin, content: Callable[[], bytes], *, large: bool = False) -> Frame | Unreadable:
    """Decode the bytes of an image file that `content` returns."""
    try:
        decoded = decode_usable(content(), max_pixels=MAX_LARGE_PIXELS if large else None)
        return Frame(decoded.image, origin)
    except (OSError, HTTPException, DecodeError) as error:
        return Unreadable(origin.path, _reason(error))


def _reason(error: Exception) -> str:
    """Why something could not be read; a failed connection has the reason inside."""
    inner = getattr(error, "reason", None)
    error = inner if isinstance(inner, OSError) else error
    return getattr(error, "strerror", None) or str(error)


DOWNLOAD_TIMEOUT_S = 20
MAX_DOWNLOAD_BYTES = 256 << 20


def download(url: str) -> bytes:
    """The content of an address, by http or https only; OSError, HTTPException or DecodeError if there is none.

    Blocks for up to DOWNLOAD_TIMEOUT_S without an answer.
    """
    parts = urlsplit(url)
    request = urllib.request.Request(without_password(url), headers={"User-Agent": "flatout"})
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        # Not sent on to the host of a redirection.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(secret).decode()}")
    with _opener().open(request, timeout=DOWNLOAD_TIMEOUT_S) as answer:
        content: bytes = answer.read(MAX_DOWNLOAD_BYTES + 1)
    if len(content) > MAX_DOWNLOAD_BYTES:
        raise DecodeError(f"larger than {MAX_DOWNLOAD_BYTES >> 20} MiB")
    return content


def _opener() -> urllib.request.OpenerDirector:
    """Opens http and https, and follows redirections between them; the default opener also reads local files."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def video_frames(origin: Origin) -> Iterator[ReadFrame]:
    """A call per frame of a video; the last one returns `Unreadable` if it cannot be opened or ends early."""
    if obstacle := _obstacle(origin.path):
        yield partial(already_read, Unreadable(origin.path, obstacle))
        return
    capture = _open(origin.path)
    seen = 0
    num_frames, fps = num_frames_of(capture), fps_of(capture)
    try:
        while (image := capture.read()[1]) is not None:  # in its own memory
            seen += 1
            frame = Frame(image, origin._replace(frame=seen, num_frames=num_frames, fps=fps))
            yield partial(already_read, frame)
    finally:
        capture.release()
    if not seen:
        yield partial(already_read, Unreadable(origin.path, "cannot be decoded: damaged, cut off, or not a video"))
    elif seen < ENOUGH * num_frames:
        yield partial(already_read, Unreadable(origin.path, f"ends after {seen} of {num_frames} frames", partly=True))


def count_frames(files: Files) -> int:
    """Number of frames of all files according to the video headers; an image counts as one."""
    count = len(files.images)
    for path in filterfalse(_obstacle, files.videos):
        capture = _open(path)
        count += max(1, num_frames_of(capture))
        capture.release()
    return count


def num_frames_of(capture: Any) -> int:
    """Number of frames according to the header; 0 for live streams."""
    import cv2

    return max(0, int(capture.get(cv2.CAP_PROP_FRAME_COUNT)))


def fps_of(capture: Any) -> float:
    """Frames per second; 0 if the header has no plausible value."""
    import cv2

    rate = float(capture.get(cv2.CAP_PROP_FPS))
    return rate if 0 < rate < 1000 else 0.0


def _obstacle(path: str) -> str:
    """Why a video cannot be opened, as far as OpenCV would not say it; empty if nothing is known."""
    try:
        path.encode()
    except UnicodeEncodeError:  # it would crash the process
        return "OpenCV cannot open a video whose name is not UTF-8"
    return "" if os.access(path, os.R_OK) else os.strerror(EACCES if os.path.exists(path) else ENOENT)


def _open(path: str) -> Any:
    import cv2

    return cv2.VideoCapture(path)
