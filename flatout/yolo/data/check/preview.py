"""A sheet of pictures with their boxes drawn on them: the check that no program can make."""

from typing import Any

import numpy as np

from flatout.feed import DecodeError
from flatout.yolo.data.decode import read_picture
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import fit, letterbox

CELL_PX = 320
COLUMNS = 4
MOST_PICTURES = 16
LINE_PX = 2
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
    import cv2

    cell = np.full((cell_px + CAPTION_PX, cell_px, 3), 32, np.uint8)
    path = images.paths[picture]
    try:
        image = read_picture(path)
    except (OSError, DecodeError) as error:
        _write(cell, str(error)[:40], (4, cell_px // 2), (80, 80, 255), cv2)
    else:
        fitted = fit((image.shape[0], image.shape[1]), (cell_px, cell_px))
        cell[:cell_px] = letterbox(image, fitted)
        _draw_labels(cell, images, picture, fitted.inner_wh, fitted.pad_wh, cv2)
    _write(cell, path.rpartition("/")[2][-44:], (4, cell_px + CAPTION_PX - 5), (220, 220, 220), cv2)
    return cell


def _draw_labels(
    cell: np.ndarray, images: ImageSet, picture: int, inner_wh: tuple[int, int], pad_wh: tuple[float, float], cv2: Any
) -> None:
    scale, pad = np.array(inner_wh), np.array(pad_wh)
    for points in images.labels.polygons_of(picture):
        if len(points):
            cv2.polylines(cell, [(points * scale + pad).round().astype(np.int32)], True, (255, 255, 255), 1)
    for number, *box in images.labels.of(picture).tolist():
        centre, size = np.array(box[:2]), np.array(box[2:])
        low = ((centre - size / 2) * scale + pad).round().astype(int).tolist()
        high = ((centre + size / 2) * scale + pad).round().astype(int).tolist()
        colour = colour_of(int(number))
        cv2.rectangle(cell, low, high, colour, LINE_PX)
        name = images.names[int(number)] if int(number) < len(images.names) else f"class {number:g}"
        _write(cell, name[:24], (max(low[0], 0) + 2, max(low[1] - 3, 10)), colour, cv2)


def colour_of(number: int) -> tuple[int, int, int]:
    """BGR; neighbours far apart on the colour circle."""
    hue = number * 0.618 % 1 * 6
    rising, falling = int(255 * (hue % 1)), int(255 * (1 - hue % 1))
    return (
        (0, rising, 255),
        (0, 255, falling),
        (rising, 255, 0),
        (255, falling, 0),
        (255, 0, rising),
        (falling, 0, 255),
    )[int(hue)]


def _write(cell: np.ndarray, text: str, at: tuple[int, int], colour: tuple[int, int, int], cv2: Any) -> None:
    # The built-in letters are ASCII; anything else becomes a question mark.
    plain = text.encode("ascii", "replace").decode()
    cv2.putText(cell, plain, at, cv2.FONT_HERSHEY_SIMPLEX, 0.4, (0, 0, 0), 3, cv2.LINE_AA)
    cv2.putText(cell, plain, at, cv2.FONT_HERSHEY_SIMPLEX, 0.4, colour, 1, cv2.LINE_AA)
