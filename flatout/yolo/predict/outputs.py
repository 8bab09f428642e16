"""Files made from results: images and videos with boxes, label files, crops, JSON.

result --threads: plot, encode, write images and crops--> one thread, in order: videos, label files, JSON, windows

Dimension key:  n detections of one image   H W image   C channels
"""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TextIO

import numpy as np

from flatout.charts import write_image
from flatout.errors import ResourceError, counted
from flatout.safefiles import append_text, write_error
from flatout.yolo.predict.files import Origin
from flatout.yolo.predict.options import DetectOptions
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.threads import Closing, WriteQueue

# JSON


class JsonFile:
    """A COCO JSON list written record by record, so that long videos do not fill the memory.

    The file gets its name when it is complete. `close()` may be called twice.
    """

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


# Names

WRITABLE = frozenset({".bmp", ".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp"})
"""Endings of image formats that can be written; other formats become JPEG."""


class OutputNames:
    """Unique names for the outputs of files and streams: a second `a` from another folder becomes `a_2`."""

    def __init__(self) -> None:
        self._stem_of: dict[int, str] = {}
        self._taken: set[str] = set()

    def stem(self, origin: Origin) -> str:
        """The name without ending, the same for every frame of a file."""
        if origin.number not in self._stem_of:
            self._stem_of[origin.number] = self._unused_name(origin.stem)
        return self._stem_of[origin.number]

    def frame_stem(self, origin: Origin) -> str:
        """The stem with the number of the frame, if there is one."""
        stem = self.stem(origin)
        return stem if origin.frame is None else f"{stem}_{origin.frame}"

    def image(self, origin: Origin) -> str:
        """The name of the image with boxes, with an ending that can be written."""
        suffix = PurePath(origin.path).suffix
        return f"{self.stem(origin)}{suffix if suffix.lower() in WRITABLE else '.jpg'}"

    def video(self, origin: Origin) -> str:
        """The name of the video with boxes; streams become .mp4."""
        suffix = ".mp4" if origin.kind == "stream" else PurePath(origin.path).suffix
        return f"{self.stem(origin)}{suffix}"

    def _unused_name(self, stem: str) -> str:
        name, number = stem, 1
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name


# Label files: `--save-txt`, `--save-conf`


def txt_lines(result: Result, *, scores: bool) -> list[str]:
    """`class cx cy w h [score] [id]` per detection, lowest score first, as YOLOv7's detect.py writes them: boxes are
    rounded to whole pixels, then divided by the size of the image. An id is added if objects are tracked."""
    height, width = result.image.shape[:2]
    low_n2, high_n2 = result.pixel_boxes[:, :2], result.pixel_boxes[:, 2:]
    box_n4 = np.concatenate(((low_n2 + high_n2) / 2, high_n2 - low_n2), 1).astype(np.float32)
    box_n4 /= np.array([width, height, width, height], np.float32)
    columns = [result.classes[:, None], box_n4, *([result.scores[:, None]] if scores else [])]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = [" ".join(f"{number:g}" for part in row for number in part) for row in rows]
    if result.ids is not None:
        lines = [f"{line} {number}" for line, number in zip(lines, result.ids.tolist(), strict=True)]
    return lines[::-1]


# Videos

CODEC = "mp4v"
DEFAULT_FPS = 30.0
"""Frame rate of a video whose own is unknown."""


class VideoFiles:
    """Writes videos frame by frame, one writer per file. Not thread-safe; `close()` may be called twice."""

    def __init__(self) -> None:
        self._writers: dict[Path, Any] = {}
        self._size_wh: dict[Path, tuple[int, int]] = {}

    def add(self, path: Path, image_HWC: np.ndarray, fps: float) -> None:
        """Write the next frame of a video; a frame of another size is resized to that of the first."""
        import cv2

        height, width = image_HWC.shape[:2]
        if path not in self._writers:
            self._writers[path] = _open(path, fps, (width, height))
            self._size_wh[path] = width, height
        if (width, height) != self._size_wh[path]:
            image_HWC = cv2.resize(image_HWC, self._size_wh[path])
        self._writers[path].write(image_HWC)

    def finish(self, path: Path) -> None:
        """Close a video after its last frame."""
        if path in self._writers:
            self._writers.pop(path).release()

    def close(self) -> None:
        for path in list(self._writers):
            self.finish(path)


def _open(path: Path, fps: float, size_wh: tuple[int, int]) -> Any:
    import cv2

    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*CODEC), fps or DEFAULT_FPS, size_wh)
    if not writer.isOpened():
        raise ResourceError(
            f"{path}: the video cannot be written. Check free space and permissions, or skip videos with --nosave."
        )
    return writer


# All outputs

STREAM_FPS = 30.0
"""Frame rate of videos of streams."""


class Outputs(Closing):
    """Writes results in threads. A context manager; all files are complete after `close()`."""

    def __init__(
        self,
        folder: Path,
        options: DetectOptions,
        *,
        threads: int,
        show: Callable[[str, np.ndarray], None] | None = None,
    ) -> None:
        """`show` is called in a thread with name and image of every plotted result, in order."""
        self.folder = folder
        self._options, self._show, self._names, self._videos = options, show, OutputNames(), VideoFiles()
        self._num_txt = self._num_crops = 0
        self._json = (
            JsonFile(folder / f"{Path(options.weights[0]).stem}_predictions.json") if options.save_json else None
        )
        self._last_video: Path | None = None
        for name, wanted in (("labels", options.save_txt), ("crops", options.save_crop)):
            if wanted:
                (folder / name).mkdir(exist_ok=True)
        self._write_queue = WriteQueue(threads=threads, depth=2 * threads)

    def wrote(self) -> Iterator[str]:
        """What was written, a line each."""
        if not self._options.nosave:
            yield "Images and videos with boxes are saved"
        if self._options.save_txt:
            yield f"{counted(self._num_txt, 'label file')} saved to {self.folder / 'labels'}"
        if self._options.save_crop:
            yield f"{counted(self._num_crops, 'crop')} saved to {self.folder / 'crops'}"
        if self._json is not None:
            yield f"Detections saved to {self._json.path}"

    def add(self, result: Result) -> None:
        """Queue a result for writing; blocks while many are waiting. Raises the error of an earlier one."""
        # Names are assigned here, where results are in order.
        stem = self._names.frame_stem(result.origin)
        name = self._names.video(result.origin) if _is_video(result) else self._names.image(result.origin)
        self._write_queue.submit(partial(self._plotted, result, stem, name), partial(self._finish, result, stem, name))

    def close(self) -> None:
        """Wait until everything is on the disk."""
        try:
            self._write_queue.close()
        finally:
            self._videos.close()
        if self._json is not None:
            self._json.close()

    def _plotted(self, result: Result, stem: str, name: str) -> np.ndarray | None:
        """Write crops, and plot and write the image; called by several threads at once."""
        if self._options.save_crop:
            write_crops(result, self.folder / "crops", stem)
        if self._options.nosave and self._show is None:
            return None
        plotted = result.plot() if len(result) else result.image
        if not self._options.nosave and not _is_video(result):
            write_file(self.folder / name, plotted)
        return plotted

    def _finish(self, result: Result, stem: str, name: str, plotted: np.ndarray | None) -> None:
        """Write everything that needs the order of the results."""
        if self._options.save_txt and len(result):
            lines = txt_lines(result, scores=self._options.save_conf)
            append_text(self.folder / "labels" / f"{stem}.txt", "".join(f"{line}\n" for line in lines))
            self._num_txt += 1
        if self._options.save_crop:
            self._num_crops += len(_crops(result))
        if self._json is not None:
            self._json.add(result.to_coco())
        if plotted is None:
            return
        if not self._options.nosave and _is_video(result):
            self._add_to_video(self.folder / name, plotted, result.origin)
        if self._show is not None:
            self._show(name, plotted)

    def _add_to_video(self, path: Path, plotted: np.ndarray, origin: Origin) -> None:
        if self._last_video is not None and self._last_video != path and origin.kind == "video":
            self._videos.finish(self._last_video)  # video files come one after another, streams in parallel
        self._last_video = path
        self._videos.add(path, plotted, STREAM_FPS if origin.kind == "stream" else origin.fps)


def _is_video(result: Result) -> bool:
    return result.origin.kind in ("video", "stream")


def folder_name(name: str) -> str:
    """The folder of a class: characters that could lead outside of it are replaced."""
    cleaned = "".join(letter if letter.isalnum() or letter in " ._-" else "_" for letter in name).strip(" .")
    return cleaned or "class"


def write_crops(result: Result, folder: Path, stem: str) -> None:
    """Write <class>/<stem>_<number>.jpg for every box that holds a pixel."""
    for number in _crops(result):
        left, top, right, bottom = result.pixel_boxes[number].tolist()
        inside = folder / folder_name(result.names[int(result.classes[number])])
        write_file(inside / f"{stem}_{number + 1}.jpg", result.image[top:bottom, left:right])


def _crops(result: Result) -> list[int]:
    """Indices of the boxes that hold a pixel."""
    return np.flatnonzero((result.pixel_boxes[:, 2:] > result.pixel_boxes[:, :2]).all(1)).tolist()


def write_file(path: Path, image_HWC: np.ndarray) -> None:
    """Write an image, and make its folder if necessary; the error says what to do."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_image(path, image_HWC)
    except OSError as error:
        raise write_error(error, path, image_HWC.nbytes) from error
