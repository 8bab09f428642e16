"""labelme: one JSON file per image, beside it, with boxes and polygons in pixels."""

import json
from collections.abc import Sequence
from typing import Any

from flatout.errors import DataError
from flatout.yolo.data.formats.annotated import (
    AnnotatedImage,
    ClassNumbers,
    ImageToWrite,
    Objects,
    around,
    invalid_json,
    numbers,
    px,
    to_labels,
)
from flatout.yolo.data.label_text import NO_BOXES, ImageLabels, Problem

VERSION = "5.5.0"
"""Version of labelme whose files ours are like."""
MAX_BYTES = 256 << 20
"""Largest file that is read; the image itself may be in it."""
WITHOUT_AREA = ("point", "points", "line", "linestrip")


def parse_labelme(content: bytes, names: tuple[str, ...], size_wh: tuple[int, int]) -> ImageLabels:
    """Parse the shapes of a file; `size_wh` is the size of the image, for files that do not have it."""
    try:
        image = _image(_load(content, ""))
    except DataError as error:
        text = str(error).removeprefix(": ").removesuffix(" Export it again.").rstrip(".")
        return ImageLabels(NO_BOXES, [], [Problem("label-encoding", 0, text)], num_dropped=1)
    return to_labels(image, ClassNumbers(names), size_wh)


def labelme_names(content: bytes) -> set[str]:
    """Class names in a file; an empty set if it cannot be parsed."""
    try:
        return {str(name) for name in _image(_load(content, "")).objects.names}
    except DataError:
        return set()


def _load(content: bytes, path: str) -> dict[str, Any]:
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise invalid_json(path, error) from None
    if not isinstance(values, dict) or not isinstance(values.get("shapes"), list):
        raise DataError(f"{path}: not a file of labelme, which has a list of shapes.")
    return values


def _image(values: dict[str, Any]) -> AnnotatedImage:
    objects = Objects()
    for place, shape in enumerate(values["shapes"], 1):
        try:
            _add(objects, shape, place)
        except (KeyError, TypeError, ValueError):
            objects.report("label-columns", f"object {place}: no label, or no points that consist of two numbers each")
    return AnnotatedImage(str(values.get("imagePath") or ""), objects, _size(values))


def _size(values: dict[str, Any]) -> tuple[float, float] | None:
    """The size that the file has for its image; None if it has none."""
    try:
        width, height = numbers((values["imageWidth"], values["imageHeight"]))
    except (KeyError, ValueError):
        return None
    return (width, height) if width > 0 and height > 0 else None


def _add(objects: Objects, shape: dict[str, Any], place: int) -> None:
    """Add one shape; KeyError, TypeError or ValueError if it is incomplete."""
    name, kind = str(shape["label"]), shape.get("shape_type") or "polygon"
    points = [numbers(point) for point in shape["points"]]
    if any(len(point) != 2 for point in points) or not points:
        raise ValueError
    if kind in WITHOUT_AREA:
        objects.report("label-shape", f"object {place}: a {kind} has no area")
    elif kind == "circle" and len(points) == 2:
        (x, y), (x2, y2) = points
        radius = ((x2 - x) ** 2 + (y2 - y) ** 2) ** 0.5
        objects.add(name, (x - radius, y - radius, x + radius, y + radius))
    elif kind in ("rectangle", "mask"):
        # A rectangle has two corners in any order, or all four.
        objects.add(name, around(points))
    elif kind == "oriented_rectangle":
        objects.report("label-rotated", f"object {place}: rotated; the upright box around it is used")
        objects.add_polygon(name, points)
    elif kind == "polygon":
        objects.add_polygon(name, points)
    else:
        objects.report("label-shape", f"object {place}: shapes of the type {str(kind)[:40]!r} are not read")


def write_labelme(image: ImageToWrite, names: Sequence[str]) -> bytes:
    """The file of one image."""
    shapes = []
    for place, (number, corners) in enumerate(zip(image.class_n, image.corners_px(), strict=True)):
        points = image.points_px(place)
        x1, y1, x2, y2 = map(px, corners)
        shape: dict[str, Any] = {
            "label": names[number],
            "points": points or [[x1, y1], [x2, y2]],
            "group_id": None,
            "description": "",
            "shape_type": "polygon" if points else "rectangle",
            "flags": {},
            "mask": None,
        }
        shapes.append(shape)
    content: dict[str, Any] = {
        "version": VERSION,
        "flags": {},
        "shapes": shapes,
        "imagePath": image.name,
        "imageData": None,
        "imageHeight": image.size_wh[1],
        "imageWidth": image.size_wh[0],
    }
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(errors="surrogateescape")
