"""What does `--source` mean? A text in; files to look at, or streams to watch, out."""

import glob
import os
from collections.abc import Iterable
from typing import NamedTuple

from flatout.errors import ConfigError, DataError
from flatout.yolo.data.find import SUFFIXES, is_image_name, read_list

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
