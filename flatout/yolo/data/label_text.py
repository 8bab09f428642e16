"""Parsing label files of YOLO text to classes, boxes and polygons, and a problem for each bad label.

A line of YOLO text is `class cx cy w h`, or `class x1 y1 x2 y2 ... xn yn` for a polygon, with all coordinates relative
to the image. `parse_labels` judges each line by itself. `parse_labels_strictly` applies the rules of YOLOv7: one bad
line rejects the whole image, and a polygon anywhere turns every line into a polygon.

Dimension key:  n labels of one image   P points of a polygon
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

MAX_BYTES = 32 << 20
"""Largest label file that is read; 20,000 boxes take 1 MB."""
MAX_LABELS = 10_000
"""Most labels in one image. With more, a step takes minutes and gigabytes; the image is refused, never truncated."""
MAX_PROBLEMS = 20
"""Problems kept per file; more would only repeat the same."""
MAX_NORMALISED = 2.0
"""Coordinates above this are in pixels; smaller ones above 1 belong to a box that reaches out of the image."""
BOX_FIELDS = 5
BOM = b"\xef\xbb\xbf"
MAX_CLASSES = 1 << 24
"""Above this, float32 cannot represent every whole number."""

HARMLESS_CHECKS = frozenset(
    {"label-bom", "label-blank-line", "label-duplicate", "label-image-size", "label-mixed", "label-rotated"}
)
"""Label checks that lose no label; every other label problem means that the label is dropped."""

_LINE = re.compile(rb"\S[^\r\n]*")
_PLAIN = re.compile(r"[-+0-9.eE \n]*")


class Problem(NamedTuple):
    """Something wrong or unusual in an image or a label file."""

    check: str
    """Id of the check that reports it."""
    line: int
    """Line number from 1; 0 means the whole file."""
    text: str


class ImageLabels(NamedTuple):
    """Labels of one image."""

    class_box_n5: np.ndarray
    """float32: class, then centre x, y, width and height relative to the image."""
    polygons: list[np.ndarray]
    """One float32 [points, 2] for each label, empty for a box; an empty list if there is no polygon at all."""
    problems: list[Problem]
    num_dropped: int = 0
    """Number of unusable labels, including those beyond MAX_PROBLEMS; duplicates do not count."""


class RejectedLabels(Exception):
    """The strict rules reject the whole label file."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.num_labels = 1
        """Labels that are lost with the file; 1 if it cannot be read."""


NO_BOXES = np.zeros((0, 5), np.float32)
NO_POINTS = np.zeros((0, 2), np.float32)


def num_lines(content: bytes, *, most: int = MAX_LABELS) -> int:
    """Number of lines that are not blank; stops at `most` + 1, so that no file takes long."""
    return sum(1 for _ in islice(_LINE.finditer(content), most + 1))


def too_many_labels() -> ImageLabels:
    """The result for an image with more than MAX_LABELS labels: no labels, and a problem that prevents training."""
    problem = Problem("label-too-many", 0, f"more than {MAX_LABELS:,} labels for one image")
    return ImageLabels(NO_BOXES, [], [problem], num_dropped=1)


def drops_a_label(problem: Problem) -> bool:
    """Whether a problem means that a label is lost; false for harmless ones and for problems of images."""
    is_of_label = problem.check.startswith("label-") or problem.check == "class-beyond-names"
    return is_of_label and problem.check not in HARMLESS_CHECKS


def decode_text(content: bytes) -> str:
    """The text of a label file; ValueError if it is not UTF-8 text."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content:
        raise ValueError("it contains UTF-16 or binary data")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None


def parse_labels(content: bytes) -> ImageLabels:
    """Parse each line by itself: bad lines are dropped and reported; boxes and polygons may be mixed."""
    try:
        text = decode_text(content)
    except ValueError as error:
        problem = Problem("label-encoding", 0, f"not UTF-8 text: {error}")
        return ImageLabels(NO_BOXES, [], [problem], num_dropped=num_lines(content))
    if not content.startswith(BOM) and (fast := _only_boxes(text)):
        return fast
    rows, polygons, problems = [], [], []
    for number, label in _parsed_lines(text):
        if isinstance(label, Problem):
            problems.append(label._replace(line=number))
        else:
            rows.append(label[0])
            polygons.append(label[1])
    num_dropped = sum(map(drops_a_label, problems))
    problems += _harmless_problems(text, content, rows, polygons)
    has_polygon = any(len(points) for points in polygons)
    boxes = np.array(rows, np.float32) if rows else NO_BOXES
    return ImageLabels(boxes, polygons if has_polygon else [], problems[:MAX_PROBLEMS], num_dropped)


def label_line_numbers(content: bytes) -> list[int]:
    """The line number of each label that `parse_labels` returns for a file of YOLO text, from 1."""
    try:
        text = decode_text(content)
    except ValueError:
        return []
    return [number for number, label in _parsed_lines(text) if not isinstance(label, Problem)]


def parse_labels_strictly(content: bytes) -> ImageLabels:
    """Parse by the rules of YOLOv7; RejectedLabels where it would drop the image."""
    if content.startswith(BOM):  # to YOLOv7 it is part of the first number
        raise RejectedLabels("not_a_number")
    try:
        # The text is stripped first: only blank lines between labels count.
        lines = [line.split() for line in decode_text(content).strip().splitlines()]
    except ValueError:
        raise RejectedLabels("not_a_number") from None
    if not lines:
        return ImageLabels(NO_BOXES, [], [])
    is_polygon = any(len(line) > 8 for line in lines)
    rows = [_strict_numbers(line) for line in lines] if is_polygon else []
    polygons = [_strict_polygon(row) for row in rows]
    if is_polygon:
        boxes = np.array(
            [[row[0], *polygon_box(points)] for row, points in zip(rows, polygons, strict=True)], np.float32
        )
    else:
        boxes = _strict_table(lines)
    if not (boxes >= 0).all():  # also NaN
        raise RejectedLabels("negative_or_nan")
    if (boxes[:, 1:] > 1).any():
        raise RejectedLabels("above_one")
    if len(np.unique(boxes, axis=0)) < len(boxes):
        raise RejectedLabels("duplicate_row")
    return ImageLabels(boxes, polygons, [])


def polygon_box(point_P2: np.ndarray) -> np.ndarray:
    """Bounding box of points as centre and size, [4]."""
    low, high = point_P2.min(0), point_P2.max(0)
    return np.concatenate(((low + high) / 2, high - low))


def _only_boxes(text: str) -> ImageLabels | None:
    """Fast path for the usual file, where every line is a valid box; None for any other file."""
    # Only unambiguous text takes this path: plain decimal numbers, single spaces, no nan, no 1_0.
    words = text.split()
    num_lines = text.count("\n") + (not text.endswith("\n"))
    if not words or len(words) != BOX_FIELDS * num_lines or not _PLAIN.fullmatch(text):
        return None
    if {line.count(" ") for line in text.splitlines()} != {BOX_FIELDS - 1}:
        return None
    try:
        numbers = list(map(float, words))
    except ValueError:
        return None
    classes, coordinates = numbers[::BOX_FIELDS], numbers.copy()
    del coordinates[::BOX_FIELDS]
    if min(coordinates) < 0 or max(coordinates) > 1:
        return None
    if min(classes) < 0 or max(classes) > MAX_CLASSES or not all(map(float.is_integer, classes)):
        return None
    boxes = np.array(numbers, np.float32).reshape(-1, BOX_FIELDS)
    rows = boxes.view(f"V{boxes.itemsize * BOX_FIELDS}").ravel().tolist()
    if len(set(rows)) < len(rows) or not boxes[:, 3:].all():
        return None
    return ImageLabels(boxes, [], [])


def _parsed_lines(text: str) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray] | Problem]]:
    """Number and content of every line that is not blank, as `_parse_line` gives it; a repeated label is a problem."""
    seen: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        label = _parse_line(line.split())
        if not isinstance(label, Problem):
            first = seen.setdefault(label[0].tobytes() + label[1].tobytes(), number)
            if first != number:
                label = Problem("label-duplicate", 0, f"the same label as line {first}")
        yield number, label


def _parse_line(words: list[str]) -> tuple[np.ndarray, np.ndarray] | Problem:
    """Class and box [5] with polygon points [P, 2], or the problem, whose line number the caller fills in."""
    numbers = _numbers(words)
    if isinstance(numbers, Problem):
        return numbers
    if numbers[0] < 0:
        return Problem("label-class-negative", 0, f"class {numbers[0]:g} is negative")
    if numbers[0] % 1 or numbers[0] > MAX_CLASSES:
        return Problem(
            "label-class-fraction", 0, f"class {numbers[0]:g} is not a whole number from 0 to {MAX_CLASSES:,}"
        )
    if len(numbers) == BOX_FIELDS:
        return _box(numbers)
    if len(numbers) < 7:  # a class and three points
        return Problem("label-columns", 0, f'{len(numbers)} columns: a box has 5, "class cx cy w h"')
    if len(numbers) % 2 == 0:
        return Problem("label-polygon-odd", 0, f"{len(numbers) - 1} coordinates: a polygon needs x and y pairs")
    return _polygon(numbers)


def _numbers(words: list[str]) -> np.ndarray | Problem:
    """The numbers of a line as float32, the precision in which classes and coordinates are used everywhere."""
    joined = " ".join(words)
    try:
        if "_" in joined or not joined.isascii():  # Python accepts 1_0, and digits of other scripts
            raise ValueError
        with np.errstate(over="ignore"):
            numbers = np.array(words, np.float64).astype(np.float32)
    except ValueError:
        shown = joined[:40]
        if "," in joined or ";" in joined:
            return Problem("label-separator", 0, f"{shown!r} contains commas or semicolons")
        return Problem("label-not-a-number", 0, f"{shown!r} contains something that is not a number")
    if not np.isfinite(numbers).all():
        return Problem("label-nan", 0, "the line contains nan or inf")
    return numbers


def _box(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray] | Problem:
    problem = _outside(numbers[1:], "cx cy w h")
    if problem:
        return problem
    if not numbers[3:].all():
        return Problem("label-zero-area", 0, f"the box has no area: width {numbers[3]:g}, height {numbers[4]:g}")
    return numbers, NO_POINTS


def _polygon(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray] | Problem:
    points = numbers[1:].reshape(-1, 2)
    problem = _outside(points, "the points", check="label-polygon-outside", slack=0.01)
    if problem:
        return problem
    # Points slightly outside the image are clipped: nothing can be seen there.
    points = points.clip(0, 1)
    box = polygon_box(points)
    if not box[2:].all():
        return Problem("label-zero-area", 0, "the polygon has no area")
    return np.concatenate((numbers[:1], box)), points


def _outside(values: np.ndarray, what: str, *, check: str = "", slack: float = 0.0) -> Problem | None:
    low, high = float(values.min()), float(values.max())
    if high > MAX_NORMALISED:
        return Problem(
            "label-in-pixels", 0, f"{what} must be between 0 and 1, but one is {high:g}, which looks like pixels"
        )
    if low < -slack:
        return Problem(check or "label-negative", 0, f"{what} must be between 0 and 1, but one is {low:g}")
    if high > 1 + slack:
        return Problem(check or "label-above-one", 0, f"{what} must be between 0 and 1, but one is {high:g}")
    return None


def _harmless_problems(text: str, content: bytes, rows: list[np.ndarray], polygons: list[np.ndarray]) -> list[Problem]:
    """Problems of a label file that lose no label."""
    problems = []
    stripped = text.strip().splitlines()
    blank = next((number for number, line in enumerate(stripped, 1) if not line.strip()), 0)
    if blank:
        problems.append(Problem("label-blank-line", blank, "a blank line between labels"))
    if content.startswith(BOM):
        problems.append(Problem("label-bom", 1, "begins with a byte order mark"))
    num_polygons = sum(1 for points in polygons if len(points))
    if 0 < num_polygons < len(rows):
        problems.append(Problem("label-mixed", 0, f"{num_polygons} polygons and {len(rows) - num_polygons} boxes"))
    return problems


def _strict_numbers(words: list[str]) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            return np.array(words, np.float64).astype(np.float32)
    except ValueError:
        raise RejectedLabels("not_a_number") from None


def _strict_polygon(row: np.ndarray) -> np.ndarray:
    if len(row) % 2 == 0:
        raise RejectedLabels("odd_coordinate_count")
    if len(row) == 1:
        raise RejectedLabels("ragged_rows")
    return row[1:].reshape(-1, 2)


def _strict_table(lines: list[list[str]]) -> np.ndarray:
    if len({len(line) for line in lines}) > 1:
        raise RejectedLabels("ragged_rows")
    table = np.array([_strict_numbers(line) for line in lines])
    if table.shape[1] != BOX_FIELDS:
        raise RejectedLabels("column_count")
    return table
