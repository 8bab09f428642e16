"""COCO annotation files: finding those of a split, their records, and scaling them to resized images.

A COCO file is one JSON document with the boxes and polygons of all images, and classes by name. `formats.coco` reads
its labels.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.errors import DataError
from flatout.yolo.data.data_yaml import DataSet, Split
from flatout.yolo.data.formats.annotated import MAX_JSON_BYTES, invalid_json, opened
from flatout.yolo.data.formats.sidecars import read_head

MAX_SIDE_PX = 1 << 31
ROBOFLOW_NAME = "_annotations.coco.json"
"""Name of the COCO file in each folder that Roboflow exports."""
YOLOV7_VAL_ANNOTATIONS = Path("coco/annotations/instances_val2017.json")
"""Where YOLOv7 expects the annotations of COCO's val, relative to the working directory."""


# COCO files of a split, and the records in them


def annotation_file(data: DataSet, split: Split) -> Path | None:
    """The annotation file of a split: the first of `annotation_candidates` that exists."""
    return next((path for path in annotation_candidates(data, split) if path.is_file()), None)


def annotation_candidates(data: DataSet, split: Split) -> list[Path]:
    """Where the annotation file of a split may be.

    The file that the YAML names; or else the split itself, if it is a .json file; or else the usual places.
    """
    if split in data.annotations:
        return [Path(data.annotations[split])]
    entries = [Path(entry) for entry in data.entries[split][:1]]
    if own := coco_entry(data, split):
        return [own]
    # images/val2017, val2017 or val2017.txt -> annotations/instances_val2017.json
    candidates = [
        folder / f"instances_{name}.json"
        for entry in entries
        for folder in dict.fromkeys((annotation_folder(entry), entry.parent / "annotations"))
        for name in dict.fromkeys((entry.stem, split))
    ]
    return [*candidates, YOLOV7_VAL_ANNOTATIONS] if split == "val" else candidates


def coco_entry(data: DataSet, split: Split) -> Path | None:
    """The COCO file that a split is made of: its first entry, or the file of Roboflow in that folder; None if the split
    is in another format."""
    for entry in map(Path, data.entries[split][:1]):
        # A list is CreateML; a file that does not exist is reported as a missing COCO file.
        if entry.suffix.lower() == ".json" and not read_head(str(entry)).lstrip().startswith(b"["):
            return entry
        if (entry / ROBOFLOW_NAME).is_file():
            return entry / ROBOFLOW_NAME
    return None


def annotation_folder(entry: Path) -> Path:
    """The usual annotation folder for an entry of a split: images/val2017 or val2017.txt -> annotations."""
    return (entry.parent if entry.suffix == ".txt" else entry.parent.parent) / "annotations"


def load_json(path: str) -> dict[str, Any]:
    """The content of a COCO file; DataError if the file is something else."""
    content = read_json(path)
    if not isinstance(content, dict) or not {"images", "annotations", "categories"} <= set(content):
        raise DataError(
            f"{path}: not a COCO file, which has the keys images, annotations and categories. Is it the right file?"
        )
    return content


def read_json(path: str) -> Any:
    """The content of any JSON file; DataError if it cannot be read, or is larger than annotation files are."""
    with opened(path, MAX_JSON_BYTES) as file:
        content = file.read()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise invalid_json(path, error) from None


def listed(content: dict[str, Any], key: str, path: str) -> list[dict[str, Any]]:
    """The records under a key of a COCO file; DataError, with its `path`, if the value is not a list."""
    value = content[key]
    if not isinstance(value, list):
        raise DataError(f"{path}: {key} of this COCO file is not a list. Export it again.")
    return [item for item in value if isinstance(item, dict)]


def categories_by_id(content: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The categories that have `id` and `name`, in the order of their ids; DataError if there are none.

    `path` is for error messages only.
    """
    records = listed(content, "categories", path)
    found = [each for each in records if isinstance(each.get("id"), int) and "name" in each]
    if not found:
        raise DataError(f"{path}: this COCO file has no categories with id and name. Export it again.")
    return sorted(found, key=lambda category: category["id"])


def size_of(image: dict[str, Any], path: str) -> tuple[float, float]:
    """Width and height in the record of an image; DataError if it has none."""
    width, height = image.get("width"), image.get("height")
    if not all(isinstance(side, int | float) and 0 < side < MAX_SIDE_PX for side in (width, height)):
        raise DataError(f"{path}: image {image.get('file_name')!r} has no width and height. Export the file again.")
    assert width is not None and height is not None
    return width, height


# Scaling annotations to resized images: boxes, areas, polygons, masks, keypoints, widths and heights
#
# Ids stay the same. Coordinates relative to the image stay the same too, so training reads the same boxes, and AP is
# computed in pixels of the resized images.

DECIMALS = 3
"""Decimals of coordinates in pixels; COCO's own files have two."""
MAX_MASK_PIXELS = 100_000_000

NewSize = Callable[[dict[str, Any]], tuple[int, int] | None]
"""Returns the new width and height of an `images` record; None leaves out the image and its annotations."""


class _Scale(NamedTuple):
    x: float
    y: float
    size_wh: tuple[int, int]


def resized_annotations(content: dict[str, Any], new_size: NewSize, *, path: str) -> dict[str, Any]:
    """The content of an annotation file, scaled to the new sizes; `path` is for error messages only."""
    images, scales = [], {}
    for image in listed(content, "images", path):
        size_wh = new_size(image)
        if size_wh is None:
            continue
        images.append({**image, "width": size_wh[0], "height": size_wh[1]})
        width, height = size_of(image, path)
        scales[image.get("id")] = _Scale(size_wh[0] / width, size_wh[1] / height, size_wh)
    annotations = [
        _resized(annotation, scales[annotation.get("image_id")])
        for annotation in listed(content, "annotations", path)
        if annotation.get("image_id") in scales
    ]
    return {**content, "images": images, "annotations": annotations}


def _resized(annotation: dict[str, Any], scale: _Scale) -> dict[str, Any]:
    if scale.x == scale.y == 1:
        return annotation
    changed = dict(annotation)
    for key, factors in (("bbox", (scale.x, scale.y)), ("keypoints", (scale.x, scale.y, 1))):
        if key in changed:
            changed[key] = _multiplied(changed[key], factors)
    if isinstance(area := changed.get("area"), int | float):
        changed["area"] = round(area * scale.x * scale.y, DECIMALS)
    segmentation = changed.get("segmentation")
    if isinstance(segmentation, dict):
        changed["segmentation"] = resized_mask(segmentation, scale.size_wh)
    elif isinstance(segmentation, list):
        changed["segmentation"] = [_multiplied(piece, (scale.x, scale.y)) for piece in segmentation]
    return changed


def _multiplied(values: Any, factors: tuple[float, ...]) -> Any:
    """Each number times its factor, cycling through the factors; anything but a list of numbers is returned as is."""
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        return values
    # A factor of 1 is for flags, such as the visibility of a keypoint, which must stay whole numbers.
    return [
        value if factor == 1 else round(value * factor, DECIMALS)
        for value, factor in zip(values, factors * -(-len(values) // len(factors)), strict=False)
    ]


def resized_mask(mask: dict[str, Any], size_wh: tuple[int, int]) -> dict[str, Any] | list[Any]:
    """Resize a run-length encoded mask by nearest neighbour; the result has plain counts, or is [] for a damaged mask.

    Runs go down column by column and start with pixels outside the object.
    """
    import cv2

    try:
        height, width = (int(side) for side in mask["size"])
        counts = mask["counts"]
        runs = np.array(_decode_counts(counts) if isinstance(counts, str) else counts, np.int64)
        if not 0 < height * width <= MAX_MASK_PIXELS or (runs < 0).any() or runs.sum() != height * width:
            return []
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return []
    inside = np.repeat(np.arange(len(runs)) % 2, runs).astype(np.uint8).reshape(width, height)
    # The runs go by columns, so `inside` is transposed: its width is the height of the image.
    small = cv2.resize(inside, (size_wh[1], size_wh[0]), interpolation=cv2.INTER_NEAREST).reshape(-1)
    borders = np.flatnonzero(np.diff(small, prepend=np.uint8(0))) if len(small) else np.zeros(0, np.int64)
    new_runs = np.diff(np.concatenate(([0], borders, [len(small)])))
    return {"size": [size_wh[1], size_wh[0]], "counts": new_runs.tolist()}


def _decode_counts(text: str) -> list[int]:
    """Decode COCO's compressed counts: five bits per character; from the fourth count on, each is stored as the
    difference to the last but one."""
    counts: list[int] = []
    number = shift = 0
    for character in text:
        bits = ord(character) - 48
        number |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            number -= 1 << shift
        counts.append(number + (counts[-2] if len(counts) > 2 else 0))
        number = shift = 0
    return counts
