"""COCO annotation files: reading them as labels, finding those of a split, and scaling them to resized images.

A COCO file is one JSON document with the boxes and polygons of all images, and classes by name.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.errors import DataError
from flatout.yolo.data.data_yaml import DataSet, Split
from flatout.yolo.data.formats.sidecars import read_head
from flatout.yolo.data.label_text import (
    MAX_LABELS,
    MAX_PROBLEMS,
    NO_BOXES,
    NO_POINTS,
    ImageLabels,
    Problem,
    too_many_labels,
)

MAX_BYTES = 2 << 30
MAX_SIDE_PX = 1 << 31
ROBOFLOW_NAME = "_annotations.coco.json"
"""Name of the COCO file in each folder that Roboflow exports."""
YOLOV7_VAL_ANNOTATIONS = Path("coco/annotations/instances_val2017.json")
"""Where YOLOv7 expects the annotations of COCO's val, relative to the working directory."""


# Reading a COCO file


class CocoSet(NamedTuple):
    """The images of a COCO file, sorted by path, each with its labels."""

    paths: list[str]
    labels: list[ImageLabels]
    absent: list[str]
    """Images that the file lists but that do not exist."""


def coco_names(path: str) -> tuple[str, ...]:
    """The class names in the order of their ids, without the one that Roboflow adds as the parent of all others."""
    content = load_json(path)
    categories = categories_by_id(content, path)
    used = _used_categories(content, path)
    parents = {category.get("supercategory") for category in categories}
    return tuple(
        str(category["name"])
        for category in categories
        if category["id"] in used or category["name"] not in parents or category.get("supercategory") != "none"
    )


def categories_by_id(content: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The categories that have `id` and `name`, in the order of their ids; DataError if there are none.

    `path` is for error messages only.
    """
    return sorted(_categories(content, path), key=lambda category: category["id"])


def read_coco(path: str, names: Sequence[str]) -> CocoSet:
    """Read the images and labels of a COCO file; a class number is the position of the category in `names`.

    Crowd annotations are skipped. A polygon in one piece is kept; of one in several pieces only the box is used.
    """
    content = load_json(path)
    class_of = _class_numbers(content, names, path)
    by_image: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for annotation in listed(content, "annotations", path):
        if not annotation.get("iscrowd"):
            by_image[_id_of(annotation, "image_id")].append(annotation)
    images = listed(content, "images", path)
    folder = image_folder(path, images)
    rows = sorted(
        (
            (os.path.join(folder, str(image.get("file_name"))), _size(image, path), _id_of(image, "id"))
            for image in images
        ),
        key=lambda row: row[0],
    )
    present = [row for row in rows if os.path.lexists(row[0])]
    labels = [_labels(by_image[number], class_of, size) for _, size, number in present]
    absent = [name for name, _, _ in rows if not os.path.lexists(name)]
    return CocoSet([name for name, _, _ in present], labels, absent)


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
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise DataError(f"{path}: the file is larger than {MAX_BYTES >> 30} GiB. Is it the right file?")
        with open(path, "rb") as file:
            return json.load(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check its path and permissions.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {str(error)[:100]}. Write it again.") from None


def listed(content: dict[str, Any], key: str, path: str) -> list[dict[str, Any]]:
    """The records under a key of a COCO file; DataError, with its `path`, if the value is not a list."""
    value = content[key]
    if not isinstance(value, list):
        raise DataError(f"{path}: {key} of this COCO file is not a list. Export it again.")
    return [item for item in value if isinstance(item, dict)]


def _categories(content: dict[str, Any], path: str) -> list[dict[str, Any]]:
    records = listed(content, "categories", path)
    found = [each for each in records if isinstance(each.get("id"), int) and "name" in each]
    if not found:
        raise DataError(f"{path}: this COCO file has no categories with id and name. Export it again.")
    return found


def _class_numbers(content: dict[str, Any], names: Sequence[str], path: str) -> dict[int, int]:
    places = {name.strip().lower(): number for number, name in enumerate(names)}
    numbers = {}
    used = _used_categories(content, path)
    for category in _categories(content, path):
        name = str(category["name"]).strip().lower()
        if name not in places and category["id"] not in used:
            continue  # files may declare more categories than they use
        if name not in places:
            raise DataError(
                f"{path}: category {category['name']!r} is not among the names in the data YAML. Add it there."
            )
        numbers[category["id"]] = places[name]
    return numbers


def _used_categories(content: dict[str, Any], path: str) -> set[Any]:
    """Ids of the categories that have at least one annotation."""
    ids = (annotation.get("category_id") for annotation in listed(content, "annotations", path))
    return {number for number in ids if isinstance(number, int)}


def image_folder(path: str, images: Iterable[dict[str, Any]]) -> str:
    """The folder of the images of a COCO file: the first place that contains the first image.

    Places: beside the file; images/SPLIT, SPLIT, images and the folder above itself. DataError if none does.
    """
    above, stem = os.path.dirname(os.path.dirname(os.path.abspath(path))), os.path.splitext(os.path.basename(path))[0]
    split = stem.rpartition("_")[2]
    tries = [
        os.path.dirname(path),
        *(os.path.join(above, *parts) for parts in (["images", split], [split], ["images"], [])),
    ]
    first = next((str(image["file_name"]) for image in images if image.get("file_name")), "")
    for folder in tries:
        if first and os.path.lexists(os.path.join(folder, first)):
            return folder
    raise DataError(
        f"{path}: its first image {first!r} is in none of these folders: {', '.join(tries)}. "
        "Move the images to one of them."
    )


def _id_of(record: dict[str, Any], key: str) -> int | str | None:
    """An id; None for anything that cannot be one, such as a list."""
    value = record.get(key)
    return value if isinstance(value, int | str) else None


def _size(image: dict[str, Any], path: str) -> tuple[float, float]:
    width, height = image.get("width"), image.get("height")
    if not all(isinstance(side, int | float) and 0 < side < MAX_SIDE_PX for side in (width, height)):
        raise DataError(f"{path}: image {image.get('file_name')!r} has no width and height. Export the file again.")
    assert width is not None and height is not None
    return width, height


def _labels(annotations: list[dict[str, Any]], class_of: dict[int, int], size_wh: tuple[float, float]) -> ImageLabels:
    if len(annotations) > MAX_LABELS:
        return too_many_labels()
    rows, polygons, problems = [], [], []
    for annotation in annotations:
        label = _label(annotation, class_of, size_wh)
        if isinstance(label, Problem):
            problems.append(label)
        else:
            rows.append(label[0])
            polygons.append(label[1])
    has_polygon = any(len(points) for points in polygons)
    boxes = np.array(rows, np.float32) if rows else NO_BOXES
    return ImageLabels(boxes, polygons if has_polygon else [], problems[:MAX_PROBLEMS], len(problems))


def _label(
    annotation: dict[str, Any], class_of: dict[int, int], size_wh: tuple[float, float]
) -> tuple[list[float], np.ndarray] | Problem:
    named = f"annotation {annotation.get('id')}"
    number = class_of.get(_id_of(annotation, "category_id"))  # type: ignore[arg-type]
    if number is None:
        return Problem("class-beyond-names", 0, f"{named}: category {annotation.get('category_id')!r} is not declared")
    try:
        x, y, width, height = (float(value) for value in annotation["bbox"])
        if not np.isfinite((x, y, width, height)).all():
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        return Problem("label-columns", 0, f"{named}: bbox does not consist of four numbers")
    left, right = np.clip((x, x + width), 0, size_wh[0]) / size_wh[0]
    top, bottom = np.clip((y, y + height), 0, size_wh[1]) / size_wh[1]
    if right <= left or bottom <= top:
        return Problem("label-zero-area", 0, f"{named}: the box has no area inside the image")
    row = [number, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
    return row, _polygon(annotation.get("segmentation"), size_wh)


def _polygon(segmentation: Any, size_wh: tuple[float, float]) -> np.ndarray:
    """Points of a polygon in one piece, float32 [points, 2]; empty for anything else."""
    if not isinstance(segmentation, list) or len(segmentation) != 1 or not isinstance(segmentation[0], list):
        return NO_POINTS
    try:
        points = np.array(segmentation[0], np.float64).reshape(-1, 2) / size_wh
    except (TypeError, ValueError, OverflowError):
        return NO_POINTS
    good = len(points) >= 3 and bool(np.isfinite(points).all())
    return points.clip(0, 1).astype(np.float32) if good else NO_POINTS


# Scaling annotations to resized images: boxes, areas, polygons, masks, keypoints, widths and heights
#
# Ids stay the same. Coordinates relative to the image stay the same too, so training reads the same boxes, and AP is
# computed in pixels of the resized images.

DECIMALS = 3
"""Decimals of coordinates in pixels; COCO's own files have two."""
MAX_MASK_PIXELS = 100_000_000

SizeOf = Callable[[dict[str, Any]], tuple[int, int] | None]
"""Returns the new width and height of an `images` record; None leaves out the image and its annotations."""


class _Scale(NamedTuple):
    x: float
    y: float
    size_wh: tuple[int, int]


def resized_annotations(content: dict[str, Any], size_of: SizeOf, *, path: str) -> dict[str, Any]:
    """The content of an annotation file, scaled to the new sizes; `path` is for error messages only."""
    images, scales = [], {}
    for image in listed(content, "images", path):
        size_wh = size_of(image)
        if size_wh is None:
            continue
        images.append({**image, "width": size_wh[0], "height": size_wh[1]})
        scales[image.get("id")] = _scale(image, size_wh, path)
    annotations = [
        _resized(annotation, scales[annotation.get("image_id")])
        for annotation in listed(content, "annotations", path)
        if annotation.get("image_id") in scales
    ]
    return {**content, "images": images, "annotations": annotations}


def _scale(image: dict[str, Any], size_wh: tuple[int, int], path: str) -> _Scale:
    width, height = image.get("width"), image.get("height")
    if not (isinstance(width, int | float) and isinstance(height, int | float) and width > 0 and height > 0):
        raise DataError(f"{path}: image {image.get('file_name')!r} has no width and height. Export the file again.")
    return _Scale(size_wh[0] / width, size_wh[1] / height, size_wh)


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
