"""Everything that is written about results: pictures and videos with boxes, label files, crops, JSON.

result --threads: draw, encode, write pictures and crops--> one thread, in order: videos, label files, JSON, shown
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from flatout.engine.checkpoint.atomic import write_error
from flatout.yolo.pictures.picture_file import write_picture
from flatout.yolo.predict.behind import WriteBehind
from flatout.yolo.predict.frames import Origin
from flatout.yolo.predict.json_file import JsonFile
from flatout.yolo.predict.out_names import OutNames
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.txt_lines import txt_lines
from flatout.yolo.predict.video_files import VideoFiles

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
        write_picture(path, image_HWC)
    except OSError as error:
        raise write_error(error, path, image_HWC.nbytes) from error
