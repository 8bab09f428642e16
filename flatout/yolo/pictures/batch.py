"""A batch as one picture: up to 16 images in a square, with boxes, class names and file names.

Dimension key:  B images   C H W channels (RGB), height and width   T targets   n boxes of one image   D detections
"""

import math
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np

from flatout.yolo.pictures.boxes import draw_boxes
from flatout.yolo.pictures.lettering import shortened_file, write
from flatout.yolo.pictures.palette import INK, PAPER
from flatout.yolo.pictures.picture_file import write_picture

if TYPE_CHECKING:
    from flatout.yolo.nms import Detections

MOST_IMAGES = 16
MOST_PX = 1920
LEAST_CELL_PX = 240
"""Smaller inputs are enlarged, so that names can be read."""
GAP_PX = 6
CAPTION_PX = 20
SURE = 0.25
"""Detections with a higher score are shown."""
MOST_BOXES = 60
"""Per image, the surest: an untrained network would paint over everything."""


class Boxes(NamedTuple):
    """Boxes on one image, in its own pixels."""

    xyxy_n4: np.ndarray
    class_n: np.ndarray
    score_n: np.ndarray | None = None


def draw_batch(
    images_BCHW: np.ndarray, targets_T6: np.ndarray, paths: Sequence[str], names: Sequence[str], file: Path
) -> Path:
    """Images uint8 RGB with their targets (image, class, normalised cx, cy, w, h); `paths` may be empty."""
    height, width = images_BCHW.shape[2:]
    boxes = []
    for number in range(min(MOST_IMAGES, len(images_BCHW))):
        own = targets_T6[targets_T6[:, 0] == number]
        centre, half = own[:, 2:4] * (width, height), own[:, 4:6] * (width, height) / 2
        boxes.append(Boxes(np.concatenate((centre - half, centre + half), 1), own[:, 1]))
    return write_picture(file, sheet(images_BCHW, boxes, paths, names))


def draw_detections(
    images_BCHW: np.ndarray, found: "Detections", paths: Sequence[str], names: Sequence[str], file: Path
) -> Path:
    """The same with detections in pixels of the input and their scores, the surest only."""
    row_D6, image_D = found.row_D6.cpu().numpy(), found.image_D.cpu().numpy()
    boxes = []
    for number in range(min(MOST_IMAGES, len(images_BCHW))):
        own = row_D6[(image_D == number) & (row_D6[:, 4] > SURE)][:MOST_BOXES]
        boxes.append(Boxes(own[:, :4], own[:, 5], own[:, 4]))
    return write_picture(file, sheet(images_BCHW, boxes, paths, names))


def sheet(images_BCHW: np.ndarray, boxes: Sequence[Boxes], paths: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """One cell per entry of `boxes`, uint8 [h, w, 3], BGR."""
    columns = max(1, math.ceil(math.sqrt(len(boxes))))
    rows = max(1, math.ceil(len(boxes) / columns))
    height, width = images_BCHW.shape[2:]
    zoom = min(1.0, MOST_PX / (columns * width), MOST_PX / (rows * height))
    zoom = max(zoom, LEAST_CELL_PX / max(height, width))
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
    draw_boxes(cell, boxes.xyxy_n4 * zoom, boxes.class_n, names, score_n=boxes.score_n, letters_px=letters_px)
    return np.asarray(cell)
