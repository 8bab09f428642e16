"""Boxes with class names on images, and batches of such images as one plot.

Dimension key:  B images   C H W channels (RGB), rows and columns   T targets   n boxes of one image   D detections
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

import cv2
import numpy as np

from flatout.charts.canvas import (
    INK,
    PAPER,
    colour_of,
    ink_on,
    measure,
    shortened,
    shortened_file,
    write,
    write_image,
)

MAX_LETTERS = 28
LINE_PX = 2
MOST = 0.5
"""A box of which more is covered counts as hidden."""


class Tag(NamedTuple):
    """Rectangle of a name on its colour, in pixels."""

    left: int
    top: int
    right: int
    bottom: int

    def overlaps(self, other: "Tag") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def plot_boxes(
    image_HWC: np.ndarray,
    box_xyxy_n4: np.ndarray,
    class_n: np.ndarray,
    names: Sequence[str],
    *,
    score_n: np.ndarray | None = None,
    ids: Sequence[int | None] | None = None,
    letters_px: float = 7,
    line_px: int = LINE_PX,
) -> None:
    """Draw boxes into an image, in place: large boxes first, then their names.

    Names never overlap, and never hide a small box: where there is not enough room, the boxes with the highest scores
    (without scores, the largest) are named, and the others show their class by colour only. Ids, where they are not
    None, follow the names, and give the colours.
    """
    area_n = (box_xyxy_n4[:, 2:] - box_xyxy_n4[:, :2]).prod(1)
    ids = [None] * len(class_n) if ids is None else ids
    corners = box_xyxy_n4.round().astype(int).tolist()
    shade_n = [int(kind if own is None else own) for kind, own in zip(class_n, ids, strict=True)]
    for number in np.argsort(-area_n, kind="stable").tolist():
        left, top, right, bottom = corners[number]
        colour = colour_of(shade_n[number])
        cv2.rectangle(image_HWC, (left, top), (right, bottom), colour, line_px, cv2.LINE_AA)
    taken: list[Tag] = []
    for number in np.argsort(-(area_n if score_n is None else score_n), kind="stable").tolist():
        kind = int(class_n[number])
        name = shortened(name_of(kind, names), MAX_LETTERS)
        name = name if ids[number] is None else f"{name} #{ids[number]}"
        text = name if score_n is None else f"{name} {score_n[number]:.2f}"
        tags = _tag_positions(text, corners[number], image_HWC.shape[:2], letters_px)
        tag = next((tag for tag in tags if not any(map(tag.overlaps, taken)) and not _hides(tag, box_xyxy_n4)), None)
        if tag is not None:
            taken.append(tag)
            _plot_tag(image_HWC, tag, text, shade_n[number], letters_px)


def _hides(tag: Tag, box_xyxy_n4: np.ndarray) -> bool:
    """Whether a tag covers most of a box."""
    shared_n2 = np.minimum(box_xyxy_n4[:, 2:], tag[2:]) - np.maximum(box_xyxy_n4[:, :2], tag[:2])
    area_n = (box_xyxy_n4[:, 2:] - box_xyxy_n4[:, :2]).prod(1)
    return bool((shared_n2.clip(min=0).prod(1) > MOST * area_n).any())


def name_of(kind: int, names: Sequence[str]) -> str:
    """Name of a class, or its number if it has none."""
    return names[kind] if kind < len(names) else f"class {kind}"


def _tag_positions(text: str, corners: Sequence[int], size_hw: tuple[int, ...], letters_px: float) -> Iterator[Tag]:
    """Possible positions of a tag, moved into the image: above the box (left), inside it, above it (right), below."""
    left, top, right, bottom = corners
    height, width = size_hw
    margin = _margin(letters_px)
    tag_w = measure(text, letters_px, _weight(letters_px))[0] + 2 * margin
    tag_h = round(letters_px) + 2 * margin
    for x, y in ((left - 1, top - tag_h), (left - 1, top - 1), (right + 2 - tag_w, top - tag_h), (left - 1, bottom)):
        x, y = max(0, min(x, width - tag_w)), max(0, min(y, height - tag_h))
        yield Tag(x, y, x + tag_w, y + tag_h)


def _plot_tag(image_HWC: np.ndarray, tag: Tag, text: str, shade: int, letters_px: float) -> None:
    colour, margin = colour_of(shade), _margin(letters_px)
    cv2.rectangle(image_HWC, (tag.left, tag.top), (tag.right - 1, tag.bottom - 1), colour, cv2.FILLED)
    left, baseline = tag.left + margin, tag.bottom - 1 - margin
    write(image_HWC, text, left, baseline, letters_px, ink_on(colour), _weight(letters_px))


def _margin(letters_px: float) -> int:
    return max(2, round(letters_px * 0.4))


def _weight(letters_px: float) -> int:
    """Stroke width of letters."""
    return max(1, round(letters_px / 7.5))


# Batches: up to 16 images in a square, with boxes, class names and file names

MAX_IMAGES = 16
MAX_PX = 1920
MIN_CELL_PX = 240
"""Smaller images are enlarged, so that names are readable."""
GAP_PX = 6
CAPTION_PX = 20
MIN_SCORE = 0.25
"""Only detections with a higher score are shown."""
MAX_BOXES = 60
"""Boxes shown per image, those with the highest scores: those of an untrained network would cover everything."""


class Boxes(NamedTuple):
    """Boxes on one image, in its own pixels."""

    xyxy_n4: np.ndarray
    class_n: np.ndarray
    score_n: np.ndarray | None = None


def plot_batch(
    images_BCHW: np.ndarray,
    targets_T6: np.ndarray,
    paths: Sequence[str],
    names: Sequence[str],
    file: Path,
    *,
    most: int = MAX_IMAGES,
) -> Path:
    """Plot images (uint8 RGB), `most` of them at most, with their targets (image, class, normalised cx, cy, w, h);
    `paths` may be empty."""
    height, width = images_BCHW.shape[2:]
    boxes = []
    for number in range(min(most, len(images_BCHW))):
        own = targets_T6[targets_T6[:, 0] == number]
        centre, half = own[:, 2:4] * (width, height), own[:, 4:6] * (width, height) / 2
        boxes.append(Boxes(np.concatenate((centre - half, centre + half), 1), own[:, 1]))
    return write_image(file, plot_grid(images_BCHW, boxes, paths, names))


def plot_detections(
    images_BCHW: np.ndarray,
    row_D6: np.ndarray,
    image_D: np.ndarray,
    paths: Sequence[str],
    names: Sequence[str],
    file: Path,
) -> Path:
    """Plot images with detections: rows of corners in pixels of the input, score, class; and the image of each row."""
    boxes = []
    for number in range(min(MAX_IMAGES, len(images_BCHW))):
        own = row_D6[(image_D == number) & (row_D6[:, 4] > MIN_SCORE)][:MAX_BOXES]
        boxes.append(Boxes(own[:, :4], own[:, 5], own[:, 4]))
    return write_image(file, plot_grid(images_BCHW, boxes, paths, names))


def plot_grid(
    images_BCHW: np.ndarray, boxes: Sequence[Boxes], paths: Sequence[str], names: Sequence[str]
) -> np.ndarray:
    """Images in a grid, one cell per entry of `boxes`; uint8 [h, w, 3], BGR."""
    columns = max(1, math.ceil(math.sqrt(len(boxes))))
    rows = max(1, math.ceil(len(boxes) / columns))
    height, width = images_BCHW.shape[2:]
    zoom = min(1.0, MAX_PX / (columns * width), MAX_PX / (rows * height))
    zoom = max(zoom, MIN_CELL_PX / max(height, width))
    cell_w, cell_h = round(width * zoom), round(height * zoom)
    step_w, step_h = cell_w + GAP_PX, cell_h + CAPTION_PX + GAP_PX
    out = np.full((rows * step_h + GAP_PX, columns * step_w + GAP_PX, 3), PAPER, np.uint8)
    for number, one in enumerate(boxes):
        top, left = GAP_PX + number // columns * step_h, GAP_PX + number % columns * step_w
        out[top : top + cell_h, left : left + cell_w] = _cell(images_BCHW[number], one, names, (cell_w, cell_h), zoom)
        if number < len(paths):
            caption = shortened_file(PurePath(paths[number]).name, max(8, cell_w // 8))
            write(out, caption, left + 2, top + cell_h + 14, 8, INK)
    return out


def _cell(
    image_CHW: np.ndarray, boxes: Boxes, names: Sequence[str], size_wh: tuple[int, int], zoom: float
) -> np.ndarray:
    image = np.ascontiguousarray(image_CHW[::-1].transpose(1, 2, 0))
    how = cv2.INTER_AREA if zoom < 1 else cv2.INTER_LINEAR
    cell = cv2.resize(image, size_wh, interpolation=how) if size_wh != image.shape[1::-1] else image
    letters_px = min(9.0, max(6.0, size_wh[0] / 50))
    plot_boxes(cell, boxes.xyxy_n4 * zoom, boxes.class_n, names, score_n=boxes.score_n, letters_px=letters_px)
    return np.asarray(cell)
