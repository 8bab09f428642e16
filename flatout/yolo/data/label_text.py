"""Label text -> classes, boxes and polygons, and one problem for each line that is not what it should be.

A line is `class cx cy w h`, or `class x1 y1 x2 y2 ... xn yn` for a polygon; all but the class divided by the picture's
size. Two readings: `read_lines` judges each line by itself; `read_strictly` is YOLOv7's, where one bad line
costs the whole picture and a polygon anywhere turns every line into a polygon.

Dimension key:  n labels of one picture

Pascal VOC: one XML file of boxes per picture, classes by name.
"""

import re
import xml.etree.ElementTree as ElementTree
from itertools import islice
from typing import NamedTuple

import numpy as np

MOST_BYTES = 32 << 20
"""Of one label file: 20,000 boxes take 1 MB."""
MOST_LABELS = 10_000
"""In one picture. A step takes minutes and gigabytes with more: they are refused, never cut short."""
MOST_PROBLEMS = 20
"""Kept per file; more only say the same again."""
MOST_IN_PIXELS = 2.0
"""A coordinate above is no slip of a box at the border but a number of pixels."""
BOX_FIELDS = 5
BOM = b"\xef\xbb\xbf"
MOST_CLASSES = 1 << 24
"""Beyond, float32 cannot tell one class from the next."""

USED_ALL_THE_SAME = frozenset({"label-bom", "label-blank-line", "label-duplicate", "label-mixed"})
"""Checks of labels that lose nothing: every other problem of a label means that it is dropped."""

_LINE = re.compile(rb"\S[^\r\n]*")
_PLAIN = re.compile(r"[-+0-9.eE \n]*")


class Problem(NamedTuple):
    """A line that was dropped or is remarkable; `check` is the id of the check that reports it."""

    check: str
    line: int
    """From 1; 0 means the whole file."""
    text: str


class ImageLabels(NamedTuple):
    """Labels of one picture."""

    class_box_n5: np.ndarray
    """float32: class, then centre x, y, width, height divided by the picture's size."""
    polygons: list[np.ndarray]
    """One float32 [points, 2] for each label, empty for a box; an empty list if there is no polygon at all."""
    problems: list[Problem]
    num_dropped: int = 0
    """Labels that cannot be used, also those whose problem is beyond MOST_PROBLEMS; a second copy is not one."""


class RejectedLabels(Exception):
    """Strict reading refuses the whole file."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.num_labels = 1
        """That are lost with the file; 1 where it cannot be read."""


NO_BOXES = np.zeros((0, 5), np.float32)
NO_POINTS = np.zeros((0, 2), np.float32)


def num_lines(content: bytes, *, most: int = MOST_LABELS) -> int:
    """Lines that are not blank; counting ends at `most` + 1, so that no file takes long."""
    return sum(1 for _ in islice(_LINE.finditer(content), most + 1))


def too_many() -> ImageLabels:
    """What is kept of more than MOST_LABELS labels: none of them, and the problem that stops a start."""
    problem = Problem("label-too-many", 0, f"more than {MOST_LABELS:,} labels in one picture")
    return ImageLabels(NO_BOXES, [], [problem], num_dropped=1)


def drops_a_label(problem: Problem) -> bool:
    """Whether a label is lost by it; false for remarks and for what is wrong with a picture."""
    is_of_label = problem.check.startswith("label-") or problem.check == "class-beyond-names"
    return is_of_label and problem.check not in USED_ALL_THE_SAME


def decode_text(content: bytes) -> str:
    """The text of a label file; ValueError if it is none."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content:
        raise ValueError("UTF-16 or binary content")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None


def read_lines(content: bytes) -> ImageLabels:
    """Every line by itself: a bad one is dropped and named, the others stay, boxes and polygons may be mixed."""
    try:
        text = decode_text(content)
    except ValueError as error:
        problem = Problem("label-encoding", 0, f"not plain text: {error}")
        return ImageLabels(NO_BOXES, [], [problem], num_dropped=num_lines(content))
    if not content.startswith(BOM) and (fast := _only_boxes(text)):
        return fast
    rows, polygons, problems = [], [], []
    seen: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        label = _read_line(line.split())
        if isinstance(label, Problem):
            problems.append(label._replace(line=number))
            continue
        row, points = label
        first = seen.setdefault(row.tobytes() + points.tobytes(), number)
        if first != number:
            problems.append(Problem("label-duplicate", number, f"the same as line {first}"))
            continue
        rows.append(row)
        polygons.append(points)
    num_dropped = sum(map(drops_a_label, problems))
    problems += _remarks(text, content, rows, polygons)
    has_polygon = any(len(points) for points in polygons)
    boxes = np.array(rows, np.float32) if rows else NO_BOXES
    return ImageLabels(boxes, polygons if has_polygon else [], problems[:MOST_PROBLEMS], num_dropped)


def read_strictly(content: bytes) -> ImageLabels:
    """All rules of YOLOv7: RejectedLabels for whatever drops a picture there."""
    if content.startswith(BOM):  # part of the first number there
        raise RejectedLabels("not_a_number")
    try:
        # Stripped as a whole first: blank lines count only between rows.
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
    """Centre and size of the box around points, [4]."""
    low, high = point_P2.min(0), point_P2.max(0)
    return np.concatenate(((low + high) / 2, high - low))


def _only_boxes(text: str) -> ImageLabels | None:
    """The usual file, where every line is a faultless box, in one go; None for anything else."""
    # Only what cannot be misread takes this way: plain digits, one space between them, no nan, no 1_0.
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
    if min(classes) < 0 or max(classes) > MOST_CLASSES or not all(map(float.is_integer, classes)):
        return None
    boxes = np.array(numbers, np.float32).reshape(-1, BOX_FIELDS)
    rows = boxes.view(f"V{boxes.itemsize * BOX_FIELDS}").ravel().tolist()
    if len(set(rows)) < len(rows) or not boxes[:, 3:].all():
        return None
    return ImageLabels(boxes, [], [])


def _read_line(words: list[str]) -> tuple[np.ndarray, np.ndarray] | Problem:
    """Class and box [5] with its points [P, 2], or what is wrong; its line number is filled in by the caller."""
    numbers = _numbers(words)
    if isinstance(numbers, Problem):
        return numbers
    if numbers[0] < 0:
        return Problem("label-class-negative", 0, f"class {numbers[0]:g} is negative")
    if numbers[0] % 1 or numbers[0] > MOST_CLASSES:
        return Problem(
            "label-class-fraction", 0, f"class {numbers[0]:g} is not a whole number that can be told from the next"
        )
    if len(numbers) == BOX_FIELDS:
        return _box(numbers)
    if len(numbers) % 2 == 0:
        if len(numbers) > BOX_FIELDS + 1:
            return Problem("label-polygon-odd", 0, f"{len(numbers) - 1} coordinates: a polygon needs pairs")
        return Problem("label-columns", 0, f'{len(numbers)} columns: a box is "class cx cy w h"')
    if len(numbers) < 7:
        return Problem("label-columns", 0, f'{len(numbers)} columns: a box is "class cx cy w h"')
    return _polygon(numbers)


def _numbers(words: list[str]) -> np.ndarray | Problem:
    """float32; in that precision because a class or coordinate is used in no other."""
    joined = " ".join(words)
    try:
        if "_" in joined or not joined.isascii():  # Python reads 1_0 and other scripts' digits as numbers
            raise ValueError
        with np.errstate(over="ignore"):
            numbers = np.array(words, np.float64).astype(np.float32)
    except ValueError:
        shown = joined[:40]
        if "," in joined or ";" in joined:
            return Problem("label-separator", 0, f"{shown!r} is separated by commas or semicolons; use spaces")
        return Problem("label-not-a-number", 0, f"{shown!r} holds something that is no number")
    if not np.isfinite(numbers).all():
        return Problem("label-nan", 0, "nan or inf")
    return numbers


def _box(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray] | Problem:
    problem = _outside(numbers[1:], "cx cy w h")
    if problem:
        return problem
    if not numbers[3:].all():
        return Problem("label-zero-area", 0, f"width {numbers[3]:g}, height {numbers[4]:g}: a box without area")
    return numbers, NO_POINTS


def _polygon(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray] | Problem:
    points = numbers[1:].reshape(-1, 2)
    problem = _outside(points, "the points", check="label-polygon-outside", slack=0.01)
    if problem:
        return problem
    # A slip over the border is drawn back: what is outside of the picture cannot be seen.
    points = points.clip(0, 1)
    box = polygon_box(points)
    if not box[2:].all():
        return Problem("label-zero-area", 0, "a polygon without area")
    return np.concatenate((numbers[:1], box)), points


def _outside(values: np.ndarray, what: str, *, check: str = "", slack: float = 0.0) -> Problem | None:
    low, high = float(values.min()), float(values.max())
    if high > MOST_IN_PIXELS:
        return Problem("label-in-pixels", 0, f"{what} reach {high:g}: pixels? Divide by the picture's width and height")
    if low < -slack:
        return Problem(check or "label-negative", 0, f"{what} reach down to {low:g}, below 0")
    if high > 1 + slack:
        return Problem(check or "label-above-one", 0, f"{what} reach {high:g}, above 1")
    return None


def _remarks(text: str, content: bytes, rows: list[np.ndarray], polygons: list[np.ndarray]) -> list[Problem]:
    """What is worth saying about a file whose labels are used all the same."""
    remarks = []
    stripped = text.strip().splitlines()
    blank = next((number for number, line in enumerate(stripped, 1) if not line.strip()), 0)
    if blank:
        remarks.append(Problem("label-blank-line", blank, "a blank line between labels"))
    if content.startswith(BOM):
        remarks.append(Problem("label-bom", 1, "begins with a byte order mark"))
    num_polygons = sum(1 for points in polygons if len(points))
    if 0 < num_polygons < len(rows):
        remarks.append(Problem("label-mixed", 0, f"{num_polygons} polygons and {len(rows) - num_polygons} boxes"))
    return remarks


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


MOST_XML_BYTES = 4 << 20


def read_voc(content: bytes, names: tuple[str, ...], size_wh: tuple[int, int]) -> ImageLabels:
    """Boxes of an annotation file. VOC's pixels count from 1 and both corners belong to the box.

    `size_wh` is the picture's own size, because the one in the file is often wrong. Objects marked difficult are
    left out, as VOC's own evaluation does.
    """
    try:
        root = _parse(content)
    except ValueError as error:
        return ImageLabels(NO_BOXES, [], [Problem("label-encoding", 0, str(error))], num_dropped=1)
    objects = list(root.iter("object"))
    if len(objects) > MOST_LABELS:
        return too_many()
    rows, problems = [], []
    numbers = {name: number for number, name in enumerate(names)}
    for place, item in enumerate(objects, 1):
        if (item.findtext("difficult") or "0").strip() == "1":
            continue
        row = _row(item, numbers, size_wh)
        if isinstance(row, str):
            check = "class-beyond-names" if "name" in row else "label-zero-area" if "area" in row else "label-columns"
            problems.append(Problem(check, 0, f"object {place}: {row}"))
        else:
            rows.append(row)
    boxes = np.array(rows, np.float32) if rows else NO_BOXES
    return ImageLabels(boxes, [], problems[:MOST_PROBLEMS], len(problems))


def names_in(content: bytes) -> set[str]:
    """Names of the objects in an annotation file; none if it cannot be read."""
    try:
        return {name for item in _parse(content).iter("object") if (name := (item.findtext("name") or "").strip())}
    except ValueError:
        return set()


def _parse(content: bytes) -> ElementTree.Element:
    # Entities are the way XML explodes; annotations have no use for them.
    if len(content) > MOST_XML_BYTES or b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise ValueError(f"XML with a document type, or larger than {MOST_XML_BYTES >> 20} MiB")
    try:
        return ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ValueError(f"not valid XML: {error}") from None


def _row(item: ElementTree.Element, numbers: dict[str, int], size_wh: tuple[int, int]) -> list[float] | str:
    """Class, centre and size divided by the picture's; or what is wrong."""
    name = (item.findtext("name") or "").strip()
    if name not in numbers:
        return f"the name {name[:40]!r} is not among the names of the data set"
    try:
        corners = [float(item.findtext(f"bndbox/{key}") or "") for key in ("xmin", "ymin", "xmax", "ymax")]
    except ValueError:
        return "no bndbox with xmin, ymin, xmax, ymax"
    if not np.isfinite(corners).all():
        return "a corner is nan or inf"
    x1, y1, x2, y2 = corners
    width, height = size_wh
    left, right = np.clip((x1 - 1, x2), 0, width) / width
    top, bottom = np.clip((y1 - 1, y2), 0, height) / height
    if right <= left or bottom <= top:
        return f"a box without area inside the picture: {x1:g} {y1:g} {x2:g} {y2:g}"
    return [numbers[name], (left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
