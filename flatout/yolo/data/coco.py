"""COCO: one JSON file of boxes and polygons for all pictures, classes by name."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatout.errors import DataError
from flatout.yolo.data.data_yaml import DataSet, Split
from flatout.yolo.data.label_text import (
    MOST_LABELS,
    MOST_PROBLEMS,
    NO_BOXES,
    NO_POINTS,
    ImageLabels,
    Problem,
    too_many,
)

MOST_BYTES = 2 << 30
YOLOV7 = Path("coco/annotations/instances_val2017.json")
"""Where YOLOv7 has the annotations of COCO's val, from the working directory."""


class CocoSet(NamedTuple):
    """Pictures sorted by path, each with its labels."""

    paths: list[str]
    labels: list[ImageLabels]
    absent: list[str]
    """Pictures that the file names but that are nowhere."""


def coco_names(path: str) -> tuple[str, ...]:
    """The names of the classes, in the order of their ids: how the file itself numbers them."""
    return tuple(str(category["name"]) for category in categories_by_id(load_json(path)))


def categories_by_id(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The categories in the order of their ids, each with `id` and `name`; DataError if there are none."""
    return sorted(_categories(content), key=lambda category: category["id"])


def read_coco(path: str, names: Sequence[str]) -> CocoSet:
    """Pictures and labels of a COCO file; class numbers are places in `names`.

    Crowds are left out. A polygon in one piece is kept as such; of one in several pieces only the box.
    """
    content = load_json(path)
    class_of = _class_numbers(content, names, path)
    by_picture: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for annotation in listed(content, "annotations"):
        if not annotation.get("iscrowd"):
            by_picture[annotation.get("image_id")].append(annotation)
    images = listed(content, "images")
    folder = picture_folder(path, images)
    rows = sorted(
        (os.path.join(folder, str(image.get("file_name"))), _size(image, path), image.get("id")) for image in images
    )
    present = [row for row in rows if os.path.lexists(row[0])]
    labels = [_labels(by_picture[number], class_of, size) for _, size, number in present]
    absent = [name for name, _, _ in rows if not os.path.lexists(name)]
    return CocoSet([name for name, _, _ in present], labels, absent)


def annotation_file(data: DataSet, split: Split) -> Path | None:
    """The annotation file of a split: the first of `annotation_candidates` that exists."""
    return next((path for path in annotation_candidates(data, split) if path.is_file()), None)


def annotation_candidates(data: DataSet, split: Split) -> list[Path]:
    """The one that the YAML names; else the split itself, if it is one; else where they usually are."""
    if split in data.annotations:
        return [Path(data.annotations[split])]
    entries = [Path(entry) for entry in data.entries[split][:1]]
    if entries and entries[0].suffix.lower() == ".json":
        return entries
    # images/val2017, val2017 or val2017.txt -> annotations/instances_val2017.json
    candidates = [
        folder / f"instances_{name}.json"
        for entry in entries
        for folder in dict.fromkeys((annotation_folder(entry), entry.parent / "annotations"))
        for name in dict.fromkeys((entry.stem, split))
    ]
    return [*candidates, YOLOV7] if split == "val" else candidates


def annotation_folder(entry: Path) -> Path:
    """Where the annotations of an entry of a split are expected: images/val2017 or val2017.txt -> annotations."""
    return (entry.parent if entry.suffix == ".txt" else entry.parent.parent) / "annotations"


def load_json(path: str) -> dict[str, Any]:
    """DataError for whatever is no COCO file."""
    try:
        if os.path.getsize(path) > MOST_BYTES:
            raise DataError(f"{path}: larger than {MOST_BYTES >> 30} GiB. Is this the right file?")
        with open(path, "rb") as file:
            content = json.load(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check its path and permissions.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {str(error)[:100]}. Export it again.") from None
    if not isinstance(content, dict) or not {"images", "annotations", "categories"} <= set(content):
        raise DataError(f"{path}: no COCO file: it has no images, annotations and categories. Is this the right file?")
    return content


def listed(content: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The records below a key of a COCO file; DataError if that is no list."""
    value = content[key]
    if not isinstance(value, list):
        raise DataError(f"COCO file: {key} is no list. Export it again.")
    return [item for item in value if isinstance(item, dict)]


def _categories(content: dict[str, Any]) -> list[dict[str, Any]]:
    found = [each for each in listed(content, "categories") if isinstance(each.get("id"), int) and "name" in each]
    if not found:
        raise DataError("COCO file: no categories with id and name. Export it again.")
    return found


def _class_numbers(content: dict[str, Any], names: Sequence[str], path: str) -> dict[int, int]:
    places = {name.strip().lower(): number for number, name in enumerate(names)}
    numbers = {}
    for category in _categories(content):
        name = str(category["name"]).strip().lower()
        if name not in places:
            raise DataError(f"{path}: category {category['name']!r} is not among the names of the data set. Add it.")
        numbers[category["id"]] = places[name]
    return numbers


def picture_folder(path: str, images: Iterable[dict[str, Any]]) -> str:
    """Where the pictures are: tried in the places where COCO-like data sets have them."""
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
        f"{path}: its picture {first!r} is in none of {', '.join(tries)}. Move the pictures to one of them."
    )


def _size(image: dict[str, Any], path: str) -> tuple[float, float]:
    width, height = image.get("width"), image.get("height")
    if not all(isinstance(side, int | float) and side > 0 for side in (width, height)):
        raise DataError(f"{path}: picture {image.get('file_name')!r} has no width and height. Export it again.")
    assert width is not None and height is not None
    return width, height


def _labels(annotations: list[dict[str, Any]], class_of: dict[int, int], size_wh: tuple[float, float]) -> ImageLabels:
    if len(annotations) > MOST_LABELS:
        return too_many()
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
    return ImageLabels(boxes, polygons if has_polygon else [], problems[:MOST_PROBLEMS], len(problems))


def _label(
    annotation: dict[str, Any], class_of: dict[int, int], size_wh: tuple[float, float]
) -> tuple[list[float], np.ndarray] | Problem:
    named = f"annotation {annotation.get('id')}"
    number = class_of.get(annotation.get("category_id"))  # type: ignore[arg-type]
    if number is None:
        return Problem("class-beyond-names", 0, f"{named}: category {annotation.get('category_id')!r} is not declared")
    try:
        x, y, width, height = (float(value) for value in annotation["bbox"])
        if not np.isfinite((x, y, width, height)).all():
            raise ValueError
    except (KeyError, TypeError, ValueError):
        return Problem("label-columns", 0, f"{named}: bbox is not four numbers")
    left, right = np.clip((x, x + width), 0, size_wh[0]) / size_wh[0]
    top, bottom = np.clip((y, y + height), 0, size_wh[1]) / size_wh[1]
    if right <= left or bottom <= top:
        return Problem("label-zero-area", 0, f"{named}: a box without area inside the picture")
    row = [number, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
    return row, _polygon(annotation.get("segmentation"), size_wh)


def _polygon(segmentation: Any, size_wh: tuple[float, float]) -> np.ndarray:
    """float32 [points, 2] of a polygon in one piece; empty for anything else."""
    if not isinstance(segmentation, list) or len(segmentation) != 1 or not isinstance(segmentation[0], list):
        return NO_POINTS
    try:
        points = np.array(segmentation[0], np.float64).reshape(-1, 2) / size_wh
    except (TypeError, ValueError):
        return NO_POINTS
    good = len(points) >= 3 and bool(np.isfinite(points).all())
    return points.clip(0, 1).astype(np.float32) if good else NO_POINTS


# COCO annotations for pictures of another size: boxes, areas, polygons, masks, keypoints, widths and heights.
#
# Ids stay as they are. Coordinates divided by the picture's size stay what they were, so training reads the same
# boxes, and AP is computed in pixels of the pictures that are really there.

DECIMALS = 3
"""Decimals of coordinates in pixels; COCO's own have two."""
MOST_MASK_PIXELS = 100_000_000

SizeOf = Callable[[dict[str, Any]], tuple[int, int] | None]
"""The new width and height of an `images` record; None leaves the picture and its annotations out."""


class _Scale(NamedTuple):
    x: float
    y: float
    size_wh: tuple[int, int]


def resized_annotations(content: dict[str, Any], size_of: SizeOf, *, path: str) -> dict[str, Any]:
    """The content of an annotation file for the new sizes; `path` is named where a record has no size."""
    images, scales = [], {}
    for image in listed(content, "images"):
        size_wh = size_of(image)
        if size_wh is None:
            continue
        images.append({**image, "width": size_wh[0], "height": size_wh[1]})
        scales[image.get("id")] = _scale(image, size_wh, path)
    annotations = [
        _resized(annotation, scales[annotation.get("image_id")])
        for annotation in listed(content, "annotations")
        if annotation.get("image_id") in scales
    ]
    return {**content, "images": images, "annotations": annotations}


def _scale(image: dict[str, Any], size_wh: tuple[int, int], path: str) -> _Scale:
    width, height = image.get("width"), image.get("height")
    if not (isinstance(width, int | float) and isinstance(height, int | float) and width > 0 and height > 0):
        raise DataError(f"{path}: picture {image.get('file_name')!r} has no width and height. Export it again.")
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
    """Each number times its factor, the factors taken in turn; what is no list of numbers stays as it is."""
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        return values
    # A factor of 1 belongs to a flag, such as whether a keypoint is visible.
    return [
        value if factor == 1 else round(value * factor, DECIMALS)
        for value, factor in zip(values, factors * -(-len(values) // len(factors)), strict=False)
    ]


def resized_mask(mask: dict[str, Any], size_wh: tuple[int, int]) -> dict[str, Any] | list[Any]:
    """A run-length encoded mask at another size, by its nearest pixels, as plain counts; [] if it is damaged.

    Runs go down the columns, one after the other, and begin with pixels outside the object.
    """
    import cv2

    try:
        height, width = (int(side) for side in mask["size"])
        counts = mask["counts"]
        runs = np.array(_unpacked(counts) if isinstance(counts, str) else counts, np.int64)
        if not 0 < height * width <= MOST_MASK_PIXELS or (runs < 0).any() or runs.sum() != height * width:
            return []
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return []
    inside = np.repeat(np.arange(len(runs)) % 2, runs).astype(np.uint8).reshape(width, height)
    # Transposed, as the runs are, so its width is the picture's height.
    small = cv2.resize(inside, (size_wh[1], size_wh[0]), interpolation=cv2.INTER_NEAREST).reshape(-1)
    borders = np.flatnonzero(np.diff(small, prepend=np.uint8(0))) if len(small) else np.zeros(0, np.int64)
    new_runs = np.diff(np.concatenate(([0], borders, [len(small)])))
    return {"size": [size_wh[1], size_wh[0]], "counts": new_runs.tolist()}


def _unpacked(text: str) -> list[int]:
    """Counts of COCO's compact form: five bits per character; from the fourth on, differences to the last but one."""
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
