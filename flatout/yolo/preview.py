"""A preview of a data set: images with their boxes on one sheet, for the checks that only a person can make."""

import cv2
import numpy as np

from flatout.charts import plot_boxes, shortened_file, write
from flatout.feed import DecodeError
from flatout.images import read_image
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import fit, letterbox

CELL_PX = 320
COLUMNS = 4
MAX_IMAGES = 16
CAPTION_PX = 18


def preview_sheet(images: ImageSet, *, num_images: int = MAX_IMAGES, cell_px: int = CELL_PX) -> np.ndarray:
    """A grid of images, evenly spaced over the labelled ones; uint8 [H, W, 3], BGR."""
    chosen = choose_images(images, num_images)
    columns = min(COLUMNS, max(1, len(chosen)))
    rows = max(1, -(-len(chosen) // columns))
    out = np.full((rows * (cell_px + CAPTION_PX), columns * cell_px, 3), 32, np.uint8)
    for position, index in enumerate(chosen.tolist()):
        top, left = position // columns * (cell_px + CAPTION_PX), position % columns * cell_px
        out[top : top + cell_px + CAPTION_PX, left : left + cell_px] = _cell(images, index, cell_px)
    return out


def choose_images(images: ImageSet, num_images: int) -> np.ndarray:
    """Indices of images, evenly spaced among those with labels, or among all if none has labels."""
    labelled = np.flatnonzero(np.diff(images.labels.first_N))
    candidates = labelled if len(labelled) else np.arange(len(images))
    positions = np.linspace(0, len(candidates) - 1, min(num_images, len(candidates)))
    return np.take(candidates, positions.round().astype(int))


def _cell(images: ImageSet, index: int, cell_px: int) -> np.ndarray:
    cell = np.full((cell_px + CAPTION_PX, cell_px, 3), 32, np.uint8)
    path = images.paths[index]
    try:
        image = read_image(path)
    except (OSError, DecodeError) as error:
        write(cell, str(error)[:40], 4, cell_px // 2, 8, (80, 80, 255))
    else:
        fitted = fit((image.shape[0], image.shape[1]), (cell_px, cell_px))
        cell[:cell_px] = letterbox(image, fitted)
        _plot_labels(cell[:cell_px], images, index, fitted.inner_wh, fitted.pad_wh)
    write(cell, shortened_file(path.rpartition("/")[2], 44), 4, cell_px + CAPTION_PX - 5, 8, (220, 220, 220))
    return cell


def _plot_labels(
    cell: np.ndarray, images: ImageSet, index: int, inner_wh: tuple[int, int], pad_wh: tuple[float, float]
) -> None:
    scale, pad = np.array(inner_wh), np.array(pad_wh)
    for points in images.labels.polygons_of(index):
        if len(points):
            cv2.polylines(cell, [(points * scale + pad).round().astype(np.int32)], True, (255, 255, 255), 1)
    label_n5 = images.labels.of(index)
    centre, half = label_n5[:, 1:3], label_n5[:, 3:5] / 2
    box_n4 = np.concatenate(((centre - half) * scale + pad, (centre + half) * scale + pad), 1)
    plot_boxes(cell, box_n4, label_n5[:, 0], images.names)
