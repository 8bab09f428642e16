"""The form that every label format is read into and written from, and what the readers share.

    label file --reader--> AnnotatedImage: objects as the file has them --to_labels--> ImageLabels --> scan, training
    scanned image --`convert-data`--> ImageToWrite --writer--> label file

A reader says what is in a file and on which line; `to_labels` decides, for all formats alike, what is usable: classes
by name, boxes clipped to the image. Nothing in a file is executed, and no content raises anything but DataError.

Dimension key:  n objects of one image   P points of a polygon   4 left top right bottom
"""

import csv
import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from flatout.errors import DataError
from flatout.yolo.data.label_text import (
    MAX_CLASSES,
    MAX_LABELS,
    MAX_PROBLEMS,
    NO_BOXES,
    NO_POINTS,
    ImageLabels,
    Problem,
    drops_a_label,
    too_many_labels,
)

MAX_FILE_BYTES = 8 << 30
"""Largest file that is read; the boxes of Open Images take 2 GB."""
MAX_JSON_BYTES = 2 << 30
"""Largest JSON file, which has to fit into memory several times."""
SAME_ASPECT = 0.02
"""Difference of two aspect ratios that rounding a size can explain."""
DECIMALS = 3
"""Decimals of coordinates in pixels, in the files that we write."""


# Reading


class Objects:
    """The objects of one image as a file has them; compact, because a file may have millions.

    Corners are in pixels, or relative to the image: `AnnotatedImage.size_wh` tells which.
    """

    __slots__ = ("corners", "lines", "names", "points", "problems")

    def __init__(self) -> None:
        self.names: list[str | int] = []
        """Class names; a number is used as the number of the class."""
        self.corners = array("d")
        self.lines = array("q")
        """The line of each object; 0 where it is not known."""
        self.points: dict[int, Sequence[Sequence[float]] | np.ndarray] = {}
        """Object -> the points of its polygon, for those that have one."""
        self.problems: list[Problem] = []

    def add(self, name: str | int, corners: Sequence[float], *, line: int = 0) -> None:
        """Add a box: left, top, right, bottom."""
        self.names.append(name)
        self.corners.extend(corners)
        self.lines.append(line)

    def add_polygon(self, name: str | int, points: Sequence[Sequence[float]], *, line: int = 0) -> None:
        """Add a polygon; its bounding box is the box."""
        self.points[len(self.names)] = points
        self.add(name, around(points), line=line)

    def report(self, check: str, text: str, *, line: int = 0) -> None:
        """Report something about an object; whether that object is dropped depends on the check."""
        self.problems.append(Problem(check, line, text))


class AnnotatedImage(NamedTuple):
    """An image as a file lists it."""

    name: str
    """Path or file name, as the file has it."""
    objects: Objects
    size_wh: tuple[float, float] | None = None
    """Width and height that the coordinates refer to: (1, 1) if they are relative; None: those of the image itself."""


class AnnotationFile(NamedTuple):
    """The content of a file with the labels of many images."""

    images: list[AnnotatedImage]
    declared: tuple[str, ...] = ()
    """Class names in the order in which the file declares them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Class names for use without a YAML: those that are declared, then others in alphabetical order. Classes that
        have only numbers are named by them."""
        used = {name for image in self.images for name in image.objects.names}
        numbered = [name for name in used if isinstance(name, int)]
        if numbered and not self.declared:
            return tuple(map(str, range(max(numbered) + 1)))
        return (*self.declared, *sorted({name for name in used if isinstance(name, str)} - set(self.declared)))


def around(points: Iterable[Sequence[float]]) -> tuple[float, float, float, float]:
    """The upright box around some points."""
    x, y = zip(*points, strict=True)
    return min(x), min(y), max(x), max(y)


def rotated_corners(
    centre: tuple[float, float], half: tuple[float, float], degrees: float
) -> list[tuple[float, float]]:
    """The corners of a box of half the given width and height, rotated clockwise about its centre (y points down)."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    offsets = [(x * half[0], y * half[1]) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    return [(centre[0] + x * cos - y * sin, centre[1] + x * sin + y * cos) for x, y in offsets]


def ellipse_half(radius: tuple[float, float], degrees: float) -> tuple[float, float]:
    """Half the width and height of the upright box around a rotated ellipse."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return math.hypot(radius[0] * cos, radius[1] * sin), math.hypot(radius[0] * sin, radius[1] * cos)


def numbers(values: Iterable[Any]) -> list[float]:
    """The values as finite numbers; ValueError if one is not. Text is accepted, as CSV and XML have it."""
    found = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        if isinstance(value, str) and ("_" in value or not value.isascii()):
            raise ValueError  # float() accepts 1_0, and digits of other scripts
        try:
            found.append(float(value))
        except OverflowError:  # a whole number of hundreds of digits
            raise ValueError from None
    if not all(map(math.isfinite, found)):
        raise ValueError
    return found


class ClassNumbers:
    """Class numbers by name: exactly as written, or else without regard to case and surrounding spaces."""

    def __init__(self, names: Sequence[str]) -> None:
        self._exact = {name: number for number, name in reversed(list(enumerate(names)))}
        self._folded = {name.strip().lower(): number for number, name in reversed(list(enumerate(names)))}

    def of(self, name: str | int) -> int | None:
        """The number of a class; None if there is no such name. A number is returned unchanged."""
        if isinstance(name, int):
            return name if 0 <= name <= MAX_CLASSES else None
        found = self._exact.get(name)
        return self._folded.get(name.strip().lower()) if found is None else found


def to_labels(image: AnnotatedImage, classes: ClassNumbers, image_wh: tuple[int, int]) -> ImageLabels:
    """The labels of an image; `image_wh` is the size of the image itself. Boxes are clipped to the image."""
    objects = image.objects
    if len(objects.names) > MAX_LABELS:
        return too_many_labels()
    if not all(image_wh):  # the image cannot be used
        return ImageLabels(NO_BOXES, [], [])
    size_wh = image.size_wh or image_wh
    box_n4 = np.frombuffer(objects.corners).reshape(-1, 4) if objects.corners else np.zeros((0, 4))
    box_n4 = (box_n4 / np.tile(np.array(size_wh, float), 2)).clip(0, 1)
    has_area_n = (box_n4[:, 2:] > box_n4[:, :2]).all(1)
    numbers_n = [classes.of(name) for name in objects.names]
    problems = [*_other_size(image, image_wh), *objects.problems]
    rows, polygons = [], []
    for place, number in enumerate(numbers_n):
        if number is None:
            text = f"the name {str(objects.names[place])[:40]!r} is not among the class names of the data set"
            problems.append(Problem("class-beyond-names", objects.lines[place], f"object {place + 1}: {text}"))
        elif not has_area_n[place]:
            corners = " ".join(f"{value:g}" for value in objects.corners[4 * place : 4 * place + 4])
            text = f"object {place + 1}: the box has no area inside the image: {corners}"
            problems.append(Problem("label-zero-area", objects.lines[place], text))
        else:
            x1, y1, x2, y2 = box_n4[place]
            rows.append((number, (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1))
            polygons.append(_relative_points(objects.points.get(place), size_wh))
    num_dropped = sum(map(drops_a_label, problems))
    boxes = np.array(rows, np.float32) if rows else NO_BOXES
    has_polygon = any(len(points) for points in polygons)
    return ImageLabels(boxes, polygons if has_polygon else [], problems[:MAX_PROBLEMS], num_dropped)


def _other_size(image: AnnotatedImage, image_wh: tuple[int, int]) -> list[Problem]:
    """A problem if coordinates in pixels refer to an image of another shape."""
    if image.size_wh is None or image.size_wh == (1, 1):
        return []
    width, height = image.size_wh
    if abs(width * image_wh[1] / (height * image_wh[0]) - 1) <= SAME_ASPECT + 1 / min(image_wh):
        return []
    text = f"the labels are for an image of {width:g} x {height:g} px, but it has {image_wh[0]} x {image_wh[1]}"
    return [Problem("label-image-size", image.objects.lines[0] if image.objects.lines else 0, text)]


def _relative_points(points: Sequence[Sequence[float]] | np.ndarray | None, size_wh: Sequence[float]) -> np.ndarray:
    if points is None or len(points) < 3:
        return NO_POINTS
    point_P2: np.ndarray = (np.array(points, float) / np.array(size_wh, float)).clip(0, 1)
    return point_P2.astype(np.float32)


# Files of text, JSON and CSV. DataError names the file, and the line of the damage.


@contextmanager
def opened(path: str, most: int = MAX_FILE_BYTES) -> Iterator[BinaryIO]:
    """The file, open for reading; DataError if it is too large, or cannot be read, also within the block."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise DataError(f"{path}: the file is larger than {most >> 30} GiB. Is it the right file?")
            yield file
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}. Check its path and permissions.") from None


def read_text(path: str) -> str:
    """The text of a UTF-8 file of JSON."""
    try:
        with opened(path, MAX_JSON_BYTES) as file:
            return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: byte {error.start}. Export it again.") from None


def json_records(text: str, path: str) -> Iterator[tuple[Any, int]]:
    """The values of a JSON list, each with the line on which it begins."""
    decoder, at, line, counted_to = json.JSONDecoder(), _skip_blank(text, 0), 1, 0
    if text[at : at + 1] != "[":
        raise DataError(f"{path}: not valid JSON: it does not begin with a list. Is it the right file?")
    at = _skip_blank(text, at + 1)
    while text[at : at + 1] != "]":
        line, counted_to = line + text.count("\n", counted_to, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise invalid_json(path, error, line) from None
        yield value, line
        at = _skip_blank(text, at)
        if text[at : at + 1] == ",":
            at = _skip_blank(text, at + 1)
        elif text[at : at + 1] != "]":
            line += text.count("\n", counted_to, at)
            raise DataError(f"{path}:{line}: not valid JSON: a comma or ] is missing. Export it again.")


def invalid_json(path: str, error: Exception, line: int = 0) -> DataError:
    """The error for damaged JSON, with its line."""
    line = getattr(error, "lineno", line)
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:100]
    return DataError(f"{path}{f':{line}' if line else ''}: not valid JSON: {reason}. Export it again.")


def _skip_blank(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\r", "\t") and at < len(text):
        at += 1
    return at


def csv_rows(path: str) -> Iterator[tuple[list[str], int]]:
    """The rows of a CSV file with their line numbers, without blank ones."""
    line = 0
    try:
        with opened(path) as content, TextIOWrapper(content, "utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                line = reader.line_num
                if row:
                    yield row, line
    except UnicodeDecodeError:
        raise DataError(f"{path}:{line + 1}: not UTF-8 text. Export it again.") from None
    except csv.Error as error:
        raise DataError(f"{path}:{line + 1}: not valid CSV: {error}. Export it again.") from None


# Images of an annotation file

MAX_TRIED = 20


def find_listed(path: str, names: Sequence[str], *, endings: Sequence[str] = ("",)) -> list[str]:
    """The path of each image that an annotation file names.

    They are in one folder: the first of the usual ones that has one of the first images. DataError if none has.
    `endings` are tried where names have none.
    """
    if not names:
        return []
    for folder in image_folders(path):
        for name in names[:MAX_TRIED]:
            if any(os.path.lexists(os.path.join(folder, name + ending)) for ending in endings):
                return [_with_ending(os.path.join(folder, name), endings) for name in names]
    raise DataError(
        f"{path}: its first image {names[0]!r} is in none of these folders: {', '.join(image_folders(path))}. "
        "Move the images to one of them."
    )


def image_folders(path: str) -> list[str]:
    """Where the images of an annotation file may be: beside it, or in a folder of the usual names."""
    beside = os.path.dirname(path)
    above = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    stem = os.path.splitext(os.path.basename(path))[0]
    splits = dict.fromkeys((stem.rpartition("_")[2], stem.partition("-")[0]))
    return [
        beside,
        *(os.path.join(above, "images", split) for split in splits),
        *(os.path.join(above, split) for split in splits),
        os.path.join(above, "images"),
        above,
        os.path.join(beside, "images"),
        os.path.join(beside, "data"),
        *(os.path.join(beside, split) for split in splits),
    ]


def _with_ending(path: str, endings: Sequence[str]) -> str:
    return next((path + ending for ending in endings if os.path.lexists(path + ending)), path + endings[0])


# Writing


class ImageToWrite(NamedTuple):
    """An image of the data set that a writer describes."""

    name: str
    """File name in the new data set."""
    size_wh: tuple[int, int]
    class_n: list[int]
    box_n4: np.ndarray
    """float64: left, top, right, bottom relative to the image."""
    polygons: list[np.ndarray]
    """One [P, 2] for each object, relative to the image; without points if it is only a box."""

    def corners_px(self) -> np.ndarray:
        """Left, top, right, bottom in pixels, [n, 4]."""
        return np.asarray(self.box_n4 * np.tile(np.array(self.size_wh, float), 2))

    def points_px(self, place: int) -> list[list[float]]:
        """The points of the polygon of an object, in pixels; empty if it is only a box."""
        points_P2 = self.polygons[place] * np.array(self.size_wh, float) if self.polygons else NO_POINTS
        points: list[list[float]] = np.round(points_P2, DECIMALS).tolist()
        return points


def px(value: float) -> float:
    """A coordinate as it is written."""
    return round(float(value), DECIMALS)
