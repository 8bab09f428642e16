"""CSV files with one box per row: Open Images, and the two that Roboflow exports (TensorFlow, Keras RetinaNet).

    ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,...    Open Images: relative, classes by id
    filename,width,height,class,xmin,ymin,xmax,ymax                TensorFlow object detection: pixels
    path,xmin,ymin,xmax,ymax,class                                 RetinaNet, without a header: pixels

An image without objects has no row, so it is not listed.
"""

import glob
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flatout.errors import DataError
from flatout.safefiles import csv_text
from flatout.yolo.data.formats.annotated import (
    AnnotatedImage,
    AnnotationFile,
    ImageToWrite,
    Objects,
    csv_rows,
    numbers,
)

OPEN_IMAGES_COLUMNS = ("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax")
TENSORFLOW_COLUMNS = ("filename", "width", "height", "class", "xmin", "ymin", "xmax", "ymax")
RETINANET_COLUMNS = 6
DESCRIPTIONS = "class-descriptions-boxable.csv"
"""File with the name of each class id of Open Images; it may have a prefix, such as oidv7-."""
WRITTEN_COLUMNS = (
    *("ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax"),
    *("IsOccluded", "IsTruncated", "IsGroupOf", "IsDepiction", "IsInside"),
)


class _Box(NamedTuple):
    """A box as a row has it."""

    name: str
    corners: list[float]
    size_wh: tuple[float, float] | None = None
    """Width and height that the coordinates refer to; None: those of the image."""


def read_open_images(path: str) -> AnnotationFile:
    """Read the boxes of Open Images. Groups (IsGroupOf) are skipped, as crowds of COCO are."""
    rows = csv_rows(path)
    column = _columns(path, rows, OPEN_IMAGES_COLUMNS)
    name_of = _descriptions(path)
    image, label, x1, x2, y1, y2 = (column[name] for name in OPEN_IMAGES_COLUMNS)
    group = column.get("IsGroupOf")

    def parse(row: list[str]) -> _Box | None:
        if group is not None and row[group] == "1":
            return None
        return _Box(name_of.get(row[label], row[label]), numbers((row[x1], row[y1], row[x2], row[y2])), (1, 1))

    return _collected(path, rows, image, parse)


def read_tensorflow(path: str) -> AnnotationFile:
    """Read a CSV file of the TensorFlow object detection API, as Roboflow exports it."""
    rows = csv_rows(path)
    column = _columns(path, rows, TENSORFLOW_COLUMNS)
    image, width, height, label, *corners = (column[name] for name in TENSORFLOW_COLUMNS)

    def parse(row: list[str]) -> _Box:
        side_x, side_y = numbers((row[width], row[height]))
        if side_x <= 0 or side_y <= 0:
            raise ValueError
        return _Box(row[label], numbers(row[at] for at in corners), (side_x, side_y))

    return _collected(path, rows, image, parse)


def read_retinanet(path: str) -> AnnotationFile:
    """Read a CSV file of Keras RetinaNet; an image without objects has a row without a box."""

    def parse(row: list[str]) -> _Box | None:
        if len(row) != RETINANET_COLUMNS:
            raise ValueError
        return _Box(row[5], numbers(row[1:5])) if any(row[1:]) else None

    return _collected(path, csv_rows(path), 0, parse)


def _columns(path: str, rows: Iterator[tuple[list[str], int]], needed: Sequence[str]) -> dict[str, int]:
    header, _ = next(rows, ([], 0))
    column = {name.strip(): at for at, name in enumerate(header)}
    if absent := [name for name in needed if name not in column]:
        raise DataError(f"{path}:1: there is no column {absent[0]}. Is it the right file?")
    return column


def _collected(
    path: str, rows: Iterator[tuple[list[str], int]], column: int, parse: Callable[[list[str]], _Box | None]
) -> AnnotationFile:
    """The images of all rows, whose names are in `column`; a row that `parse` refuses with ValueError or IndexError is
    a problem of its image."""
    objects: dict[str, Objects] = defaultdict(Objects)
    sizes: dict[str, tuple[float, float] | None] = {}
    for row, line in rows:
        image = row[column] if column < len(row) else ""
        if not image:
            raise DataError(f"{path}:{line}: a row without the name of an image. Export the file again.")
        own = objects[image]
        try:
            if (box := parse(row)) is not None:
                sizes.setdefault(image, box.size_wh)
                own.add(box.name, box.corners, line=line)
        except (ValueError, IndexError):
            text = f"{','.join(row)[:60]!r} is not a box: columns are missing or not numbers"
            own.report("label-columns", text, line=line)
    return AnnotationFile([AnnotatedImage(image, own, sizes.get(image)) for image, own in objects.items()])


def _descriptions(path: str) -> dict[str, str]:
    """The name of each class id, from the file of descriptions near the boxes; empty if there is none."""
    beside = os.path.dirname(os.path.abspath(path))
    above = os.path.dirname(beside)
    folders = (beside, above, *(os.path.join(folder, "metadata") for folder in (beside, above)))
    for folder in folders:
        for file in sorted(glob.glob(os.path.join(glob.escape(folder), "*class-descriptions*.csv"))):
            return {row[0]: row[1] for row, _ in csv_rows(file) if len(row) >= 2 and row[0] != "LabelName"}
    return {}


def write_open_images(images: Sequence[ImageToWrite], names: Sequence[str]) -> Iterator[str]:
    """The boxes of a split, piece by piece; ids of classes are their names."""
    yield ",".join(WRITTEN_COLUMNS) + "\n"
    for image in images:
        stem, rows = os.path.splitext(image.name)[0], []
        for number, (x1, y1, x2, y2) in zip(image.class_n, image.box_n4.tolist(), strict=True):
            place = (f"{value:.7g}" for value in (x1, x2, y1, y2))
            rows.append([stem, "xclick", names[number], 1, *place, 0, 0, 0, 0, 0])
        yield csv_text(rows)


def write_descriptions(names: Sequence[str]) -> bytes:
    """The file of descriptions, in the order of the classes."""
    return csv_text([name, name] for name in names).encode()
