"""COCO annotations for pictures of another size: boxes, areas, polygons, masks, keypoints, widths and heights.

Ids stay as they are. Coordinates divided by the picture's size stay what they were, so training reads the same boxes,
and AP is computed in pixels of the pictures that are really there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flatout.errors import DataError
from flatout.yolo.data.coco_json import listed

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
