"""A preview of a data set: images with their boxes on one sheet, for the checks that only a person can make."""

import cv2
import numpy as np

from flatout.charts import Boxes, plot_grid, write
from flatout.feed import DecodeError
from flatout.images import read_image
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import fit, letterbox

CELL_PX = 320
MAX_IMAGES = 16


def preview_sheet(images: ImageSet) -> np.ndarray:
    """A grid of images, evenly spaced over the labelled ones, or over all if none has labels; uint8 [H, W, 3], BGR."""
    labelled = np.flatnonzero(np.diff(images.labels.first_N))
    candidates = labelled if len(labelled) else np.arange(len(images))
    positions = np.linspace(0, len(candidates) - 1, min(MAX_IMAGES, len(candidates)))
    chosen = np.take(candidates, positions.round().astype(int)).tolist()
    cells = [_cell(images, index) for index in chosen]
    pixels_BCHW = np.stack([image_HWC for image_HWC, _ in cells])[..., ::-1].transpose(0, 3, 1, 2)
    return plot_grid(
        pixels_BCHW, [boxes for _, boxes in cells], [images.paths[index] for index in chosen], images.names
    )


def _cell(images: ImageSet, index: int) -> tuple[np.ndarray, Boxes]:
    """A letterboxed image with the outlines of its polygons, uint8 [H, W, 3], BGR; and its boxes."""
    try:
        image = read_image(images.paths[index])
    except (OSError, DecodeError) as error:
        empty = np.full((CELL_PX, CELL_PX, 3), 32, np.uint8)
        write(empty, str(error)[:40], 4, CELL_PX // 2, 8, (80, 80, 255))
        return empty, Boxes(np.zeros((0, 4)), np.zeros(0))
    fitted = fit((image.shape[0], image.shape[1]), (CELL_PX, CELL_PX))
    cell, scale, pad = letterbox(image, fitted), np.array(fitted.inner_wh), np.array(fitted.pad_wh)
    for points in images.labels.polygons_of(index):
        if len(points):
            cv2.polylines(cell, [(points * scale + pad).round().astype(np.int32)], True, (255, 255, 255), 1)
    label_n5 = images.labels.of(index)
    centre, half = label_n5[:, 1:3], label_n5[:, 3:5] / 2
    return cell, Boxes(
        np.concatenate(((centre - half) * scale + pad, (centre + half) * scale + pad), 1), label_n5[:, 0]
    )
