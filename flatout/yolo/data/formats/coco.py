"""COCO: one JSON file with all images, boxes and polygons, in pixels."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flatout.yolo.data.coco import categories_by_id, listed, load_json, size_of
from flatout.yolo.data.formats.annotated import AnnotatedImage, AnnotationFile, ImageToWrite, Objects, numbers, px
from flatout.yolo.data.label_text import NO_POINTS


def read_coco(path: str) -> AnnotationFile:
    """Read a file; its class names are in the order of their ids.

    Crowd annotations are skipped. A polygon in one piece is kept; of one in several pieces only the box is used.
    """
    content = load_json(path)
    annotations = listed(content, "annotations", path)
    categories = categories_by_id(content, path)
    name_of = {category["id"]: str(category["name"]) for category in categories}
    by_image: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for annotation in annotations:
        if not annotation.get("iscrowd"):
            by_image[_id_of(annotation, "image_id")].append(annotation)
    images = []
    for image in listed(content, "images", path):
        made = AnnotatedImage(str(image.get("file_name")), Objects(), size_of(image, path))
        for annotation in by_image[_id_of(image, "id")]:
            _add(made, annotation, name_of)
        images.append(made)
    used = {_id_of(annotation, "category_id") for annotation in annotations}
    # Roboflow adds a category as the parent of all others.
    parents = {category.get("supercategory") for category in categories}
    names = [
        str(category["name"])
        for category in categories
        if category["id"] in used or category["name"] not in parents or category.get("supercategory") != "none"
    ]
    return AnnotationFile(images, tuple(names))


def _add(image: AnnotatedImage, annotation: dict[str, Any], name_of: dict[int, str]) -> None:
    """Add an annotation to the objects of its image, or report why it cannot be used."""
    objects, named = image.objects, f"annotation {annotation.get('id')}"
    name = name_of.get(_id_of(annotation, "category_id"))  # type: ignore[arg-type]
    if name is None:
        text = f"{named}: category {annotation.get('category_id')!r} is not declared"
        objects.report("class-beyond-names", text)
        return
    try:
        x, y, width, height = numbers(annotation["bbox"])
    except (KeyError, TypeError, ValueError):
        objects.report("label-columns", f"{named}: bbox does not consist of four numbers")
        return
    assert image.size_wh is not None
    x2, y2 = x + width, y + height
    if min(x2, image.size_wh[0]) <= max(x, 0) or min(y2, image.size_wh[1]) <= max(y, 0):
        objects.report("label-zero-area", f"{named}: the box has no area inside the image")
        return
    if len(point_P2 := _points(annotation.get("segmentation"))):
        objects.points[len(objects.names)] = point_P2
    objects.add(name, (x, y, x2, y2))


def _points(segmentation: Any) -> np.ndarray:
    """Points of a polygon in one piece, float64 [P, 2]; none for anything else."""
    try:
        (piece,) = segmentation
        point_P2 = np.array(piece, np.float64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        return NO_POINTS
    return point_P2 if np.isfinite(point_P2).all() else NO_POINTS


def _id_of(record: dict[str, Any], key: str) -> int | str | None:
    """An id; None for anything that cannot be one, such as a list."""
    value = record.get(key)
    return value if isinstance(value, int | str) else None


def write_coco(images: Sequence[ImageToWrite], names: Sequence[str]) -> Iterator[str]:
    """The file of a split, piece by piece. Ids of images, annotations and categories count from 1."""
    yield '{"info": {}, "licenses": [],\n"categories": '
    yield json.dumps([{"id": number, "name": name, "supercategory": ""} for number, name in enumerate(names, 1)])
    yield ',\n"images": ['
    for number, image in enumerate(images, 1):
        width, height = image.size_wh
        record = {"id": number, "file_name": image.name, "width": width, "height": height}
        yield f"{',' if number > 1 else ''}\n{json.dumps(record)}"
    yield '\n],\n"annotations": ['
    count = 0
    for number, image in enumerate(images, 1):
        for place, (class_number, corners) in enumerate(zip(image.class_n, image.corners_px().tolist(), strict=True)):
            count += 1
            x1, y1, x2, y2 = corners
            points = image.points_px(place)
            record = {
                "id": count,
                "image_id": number,
                "category_id": class_number + 1,
                "bbox": [px(x1), px(y1), px(x2 - x1), px(y2 - y1)],
                "area": px(_area(points) if points else (x2 - x1) * (y2 - y1)),
                "iscrowd": 0,
                "segmentation": [[value for point in points for value in point]] if points else [],
            }
            yield f"{',' if count > 1 else ''}\n{json.dumps(record)}"
    yield "\n]}\n"


def _area(points: Sequence[Sequence[float]]) -> float:
    """Area of a polygon."""
    following = [*points[1:], points[0]]
    return abs(sum(x * y2 - x2 * y for (x, y), (x2, y2) in zip(points, following, strict=True))) / 2
