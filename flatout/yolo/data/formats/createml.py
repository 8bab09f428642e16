"""CreateML: one JSON list for all images of a folder; a box is its centre and size in pixels."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from flatout.errors import DataError
from flatout.yolo.data.formats.annotated import (
    AnnotatedImage,
    AnnotationFile,
    ImageToWrite,
    Objects,
    json_records,
    numbers,
    px,
    read_text,
)

FILE_NAME = "_annotations.createml.json"
"""The name that Roboflow gives such a file."""


def read_createml(path: str) -> AnnotationFile:
    """Read a file; the sizes of the images are not in it."""
    images: list[AnnotatedImage] = []
    for record, line in json_records(read_text(path), path):
        name = record.get("image", record.get("imagefilename")) if isinstance(record, dict) else None
        if not isinstance(name, str):
            raise DataError(f"{path}:{line}: not a record of CreateML, which has an image. Is it the right file?")
        objects = Objects()
        listed = record.get("annotations", record.get("annotation"))
        for place, annotation in enumerate(listed if isinstance(listed, list) else [], 1):
            try:
                objects.add(*_box(annotation), line=line)
            except (KeyError, TypeError, ValueError):
                text = f"object {place} of {name}: no label, or no numbers x, y, width, height"
                objects.report("label-columns", text, line=line)
        images.append(AnnotatedImage(name, objects))
    return AnnotationFile(images)


def _box(annotation: dict[str, Any]) -> tuple[str, tuple[float, float, float, float]]:
    at = annotation["coordinates"]
    x, y, width, height = numbers(at[key] for key in ("x", "y", "width", "height"))
    return str(annotation["label"]), (x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def write_createml(images: Sequence[ImageToWrite], names: Sequence[str]) -> Iterator[str]:
    """The file of a split, piece by piece."""
    for place, image in enumerate(images):
        annotations = []
        for number, (x1, y1, x2, y2) in zip(image.class_n, image.corners_px().tolist(), strict=True):
            centre = {"x": px((x1 + x2) / 2), "y": px((y1 + y2) / 2)}
            coordinates = {**centre, "width": px(x2 - x1), "height": px(y2 - y1)}
            annotations.append({"label": names[number], "coordinates": coordinates})
        record = json.dumps({"image": image.name, "annotations": annotations}, ensure_ascii=False)
        yield f"{',' if place else '['}\n{record}"
    yield "\n]\n" if images else "[]\n"
