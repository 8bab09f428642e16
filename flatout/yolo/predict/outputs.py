"""Everything that is written about results: pictures and videos with boxes, label files, crops, JSON.

result --threads: draw, encode, write pictures and crops--> one thread, in order: videos, label files, JSON, shown
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Self, TextIO

import numpy as np

from flatout.charts import write_image
from flatout.errors import ResourceError
from flatout.safefiles import write_error
from flatout.yolo.predict.files import Origin
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.threads import WriteBehind

# Detections as one COCO JSON list, written as they come: a night of video does not pile up in memory.


class JsonFile:
    """A list that grows record by record, and gets its name when it is complete. `close()` may be called twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_suffix(".json.part")
        self._file: TextIO | None = None
        self._count = 0
        self._closed = False

    def add(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self._write(f"{',' if self._count else '['}\n{json.dumps(record)}")
            self._count += 1

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._write("\n]\n" if self._count else "[]\n")
        if self._file is not None:
            self._file.close()
        os.replace(self._part, self.path)

    def _write(self, text: str) -> None:
        try:
            if self._file is None:
                self._file = self._part.open("w")
            self._file.write(text)
        except OSError as error:
            raise write_error(error, self._part, len(text)) from error


# Under which name is the result of a file written? Each under its own, and no two under the same.

WRITABLE = frozenset({".bmp", ".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp"})
"""Endings of pictures that can be written; other formats become JPEG."""


class OutNames:
    """Gives every file or stream a stem; the second `a` of different folders becomes `a_2`."""

    def __init__(self) -> None:
        self._stem_of: dict[int, str] = {}
        self._taken: set[str] = set()

    def stem(self, origin: Origin) -> str:
        """The same for every frame of a file."""
        if origin.number not in self._stem_of:
            self._stem_of[origin.number] = self._free(origin.stem)
        return self._stem_of[origin.number]

    def frame_stem(self, origin: Origin) -> str:
        """With the number of the frame, where there is one."""
        stem = self.stem(origin)
        return stem if origin.frame is None else f"{stem}_{origin.frame}"

    def picture(self, origin: Origin) -> str:
        """Of the picture with its boxes, with an ending that can be written."""
        suffix = PurePath(origin.path).suffix
        return f"{self.stem(origin)}{suffix if suffix.lower() in WRITABLE else '.jpg'}"

    def video(self, origin: Origin) -> str:
        """Of the video with boxes; streams become .mp4."""
        suffix = ".mp4" if origin.kind == "stream" else PurePath(origin.path).suffix
        return f"{self.stem(origin)}{suffix}"

    def _free(self, stem: str) -> str:
        name, number = stem, 1
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name


# Detections as lines of a label file: `--save-txt`, `--save-conf`.
#
# Dimension key:  n detections


def txt_lines(result: Result, *, scores: bool) -> list[str]:
    """`class cx cy w h [score]` per detection, the least sure first, of boxes rounded to whole pixels and divided by
    the size of the picture: so YOLOv7's detect.py writes them."""
    height, width = result.image.shape[:2]
    low_n2, high_n2 = result.pixel_boxes[:, :2], result.pixel_boxes[:, 2:]
    box_n4 = np.concatenate(((low_n2 + high_n2) / 2, high_n2 - low_n2), 1).astype(np.float32)
    box_n4 /= np.array([width, height, width, height], np.float32)
    rows = zip(result.classes.tolist(), box_n4.tolist(), result.scores.tolist(), strict=True)
    lines = [
        " ".join(f"{number:g}" for number in (kind, *box, *((score,) if scores else ()))) for kind, box, score in rows
    ]
    return lines[::-1]


# Videos with boxes on them, written frame by frame. Every frame of a video goes through one writer, in order.

CODEC = "mp4v"
USUAL_FPS = 30.0


class VideoFiles:
    """Writers by file name. Not for several threads at once; `close()` may be called twice."""

    def __init__(self) -> None:
        self._writers: dict[Path, Any] = {}
        self._size_wh: dict[Path, tuple[int, int]] = {}

    def add(self, path: Path, image_HWC: np.ndarray, fps: float) -> None:
        """The next frame of a video; a frame of another size than the first is resized to it."""
        import cv2

        height, width = image_HWC.shape[:2]
        if path not in self._writers:
            self._writers[path] = _open(path, fps, (width, height))
            self._size_wh[path] = width, height
        if (width, height) != self._size_wh[path]:
            image_HWC = cv2.resize(image_HWC, self._size_wh[path])
        self._writers[path].write(image_HWC)

    def finish(self, path: Path) -> None:
        """No more frames of this one."""
        if path in self._writers:
            self._writers.pop(path).release()

    def close(self) -> None:
        for path in list(self._writers):
            self.finish(path)


def _open(path: Path, fps: float, size_wh: tuple[int, int]) -> Any:
    import cv2

    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*CODEC), fps or USUAL_FPS, size_wh)
    if not writer.isOpened():
        raise ResourceError(
            f"{path}: the video cannot be written. Is there room, and may you write there? Without videos: --nosave"
        )
    return writer


STREAM_FPS = 30.0


class Wishes(NamedTuple):
    """What is written."""

    pictures: bool = True
    """Pictures and videos with boxes."""
    txt: bool = False
    scores: bool = False
    """In label files."""
    crops: bool = False
    json: str | None = None
    """Name of the JSON file."""
    show: Callable[[str, np.ndarray], None] | None = None
    """Gets name and picture of every drawn result, in order, in a thread."""


class Outputs:
    """Writes results behind the caller's back. A context manager; what was handed over is complete after `close()`."""

    def __init__(self, folder: Path, wishes: Wishes, *, threads: int) -> None:
        self.folder = folder
        self.num_txt = self.num_crops = 0
        self._wishes, self._names, self._videos = wishes, OutNames(), VideoFiles()
        self._json = JsonFile(folder / wishes.json) if wishes.json else None
        self._last_video: Path | None = None
        for name, wanted in (("labels", wishes.txt), ("crops", wishes.crops)):
            if wanted:
                (folder / name).mkdir(exist_ok=True)
        self._behind = WriteBehind(threads=threads, depth=2 * threads)

    def keep(self, result: Result) -> None:
        """Hand a result over; blocks while many are waiting. Raises what went wrong with earlier ones."""
        # Names are given here, where results are in order.
        stem, name = self._names.frame_stem(result.origin), self._name(result)
        self._behind.submit(partial(self._drawn, result, stem, name), partial(self._finish, result, stem, name))

    def close(self) -> None:
        """Wait until everything is on the disk."""
        try:
            self._behind.close()
        finally:
            self._videos.close()
        if self._json is not None:
            self._json.close()

    def _name(self, result: Result) -> str:
        is_moving = result.origin.kind in ("video", "stream")
        return self._names.video(result.origin) if is_moving else self._names.picture(result.origin)

    def _drawn(self, result: Result, stem: str, name: str) -> np.ndarray | None:
        """In a thread, side by side with others."""
        if self._wishes.crops:
            self._write_crops(result, stem)
        if not self._wishes.pictures and self._wishes.show is None:
            return None
        drawn = result.draw() if len(result) else result.image
        if self._wishes.pictures and result.origin.kind not in ("video", "stream"):
            _write(self.folder / name, drawn)
        return drawn

    def _finish(self, result: Result, stem: str, name: str, drawn: np.ndarray | None) -> None:
        """In order."""
        origin = result.origin
        if self._wishes.txt and len(result):
            self._append(self.folder / "labels" / f"{stem}.txt", txt_lines(result, scores=self._wishes.scores))
        if self._wishes.crops:
            self.num_crops += len(_crops(result))
        if self._json is not None:
            self._json.add(result.to_coco())
        if drawn is None:
            return
        if self._wishes.pictures and origin.kind in ("video", "stream"):
            self._add_to_video(self.folder / name, drawn, result.origin)
        if self._wishes.show is not None:
            self._wishes.show(name, drawn)

    def _add_to_video(self, path: Path, drawn: np.ndarray, origin: Origin) -> None:
        if self._last_video is not None and self._last_video != path and origin.kind == "video":
            self._videos.finish(self._last_video)  # files come one after the other, streams side by side
        self._last_video = path
        self._videos.add(path, drawn, STREAM_FPS if origin.kind == "stream" else origin.fps)

    def _append(self, path: Path, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        try:
            with path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise write_error(error, path, len(text)) from error
        self.num_txt += 1

    def _write_crops(self, result: Result, stem: str) -> None:
        """crops/<class>/<stem>_<number>.jpg of every box that holds a pixel."""
        for number in _crops(result):
            left, top, right, bottom = result.pixel_boxes[number].tolist()
            folder = self.folder / "crops" / folder_name(result.names[int(result.classes[number])])
            folder.mkdir(exist_ok=True)
            _write(folder / f"{stem}_{number + 1}.jpg", result.image[top:bottom, left:right])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        try:
            self.close()
        except BaseException:
            if kind is None:
                raise


def folder_name(name: str) -> str:
    """A class as the name of a folder: whatever would lead elsewhere is replaced."""
    cleaned = "".join(letter if letter.isalnum() or letter in " ._-" else "_" for letter in name).strip(" .")
    return cleaned or "class"


def _crops(result: Result) -> list[int]:
    """The boxes that hold a pixel."""
    return np.flatnonzero((result.pixel_boxes[:, 2:] > result.pixel_boxes[:, :2]).all(1)).tolist()


def _write(path: Path, image_HWC: np.ndarray) -> None:
    try:
        write_image(path, image_HWC)
    except OSError as error:
        raise write_error(error, path, image_HWC.nbytes) from error
