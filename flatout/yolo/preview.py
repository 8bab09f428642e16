"""A sheet of pictures with their boxes drawn on them: the check that no program can make."""

import cv2
import numpy as np

from flatout.charts import plot_boxes, shortened_file, write
from flatout.feed import DecodeError
from flatout.images import read_image
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import fit, letterbox

CELL_PX = 320
COLUMNS = 4
MOST_PICTURES = 16
CAPTION_PX = 18


def sheet(images: ImageSet, *, num_pictures: int = MOST_PICTURES, cell_px: int = CELL_PX) -> np.ndarray:
    """A grid of pictures spread evenly over the set, labelled ones first; uint8 [H, W, 3], BGR."""
    chosen = choose(images, num_pictures)
    columns = min(COLUMNS, max(1, len(chosen)))
    rows = max(1, -(-len(chosen) // columns))
    out = np.full((rows * (cell_px + CAPTION_PX), columns * cell_px, 3), 32, np.uint8)
    for place, picture in enumerate(chosen.tolist()):
        top, left = place // columns * (cell_px + CAPTION_PX), place % columns * cell_px
        out[top : top + cell_px + CAPTION_PX, left : left + cell_px] = _cell(images, picture, cell_px)
    return out


def choose(images: ImageSet, num_pictures: int) -> np.ndarray:
    """Numbers of pictures to look at, evenly spaced among those with labels; all others only if there are none."""
    labelled = np.flatnonzero(np.diff(images.labels.first_N))
    among = labelled if len(labelled) else np.arange(len(images))
    places = np.linspace(0, len(among) - 1, min(num_pictures, len(among)))
    return np.take(among, places.round().astype(int))


def _cell(images: ImageSet, picture: int, cell_px: int) -> np.ndarray:
    cell = np.full((cell_px + CAPTION_PX, cell_px, 3), 32, np.uint8)
    path = images.paths[picture]
    try:
        image = read_image(path)
    except (OSError, DecodeError) as error:
        write(cell, str(error)[:40], 4, cell_px // 2, 8, (80, 80, 255))
    else:
        fitted = fit((image.shape[0], image.shape[1]), (cell_px, cell_px))
        cell[:cell_px] = letterbox(image, fitted)
        _draw_labels(cell[:cell_px], images, picture, fitted.inner_wh, fitted.pad_wh)
    write(cell, shortened_file(path.rpartition("/")[2], 44), 4, cell_px + CAPTION_PX - 5, 8, (220, 220, 220))
    return cell


def _draw_labels(
    cell: np.ndarray, images: ImageSet, picture: int, inner_wh: tuple[int, int], pad_wh: tuple[float, float]
) -> None:
    scale, pad = np.array(inner_wh), np.array(pad_wh)
    for points in images.labels.polygons_of(picture):
        if len(points):
            cv2.polylines(cell, [(points * scale + pad).round().astype(np.int32)], True, (255, 255, 255), 1)
    label_n5 = images.labels.of(picture)
    centre, half = label_n5[:, 1:3], label_n5[:, 3:5] / 2
    box_n4 = np.concatenate(((centre - half) * scale + pad, (centre + half) * scale + pad), 1)
    plot_boxes(cell, box_n4, label_n5[:, 0], images.names)
