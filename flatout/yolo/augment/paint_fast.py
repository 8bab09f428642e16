"""Pixels of a sample, the fast way: the same pictures as `paint.Classic`, in buffers that are used again.

Where the time goes is measured in bench/augment_cpu.py. What is saved against the plain way: only the part of a canvas
that the warp looks at is written, and grey only where tiles leave a gap; pixels have four bytes until their colours
change, which OpenCV warps faster than three; colour tables that are a plain scaling are applied as one, with vector
instructions; nothing is allocated, and the planes of the result are written straight into the batch.
"""

import math

import cv2
import numpy as np

from flatout.profiler import clock
from flatout.yolo.augment.color import HUES, Color
from flatout.yolo.augment.paint import Placed, paste_copies, visible, warp
from flatout.yolo.data.letterbox import PADDING

BAND_PIXELS = 51200
"""Pixels whose colours are changed at a time, so that all steps find them in a core's cache."""
MIX_ROWS = 16

Region = tuple[int, int, int, int]
"""x1, y1, x2, y2 in canvas pixels."""


class Fast:
    """Paints with one set of buffers; one per thread. Pictures that it hands to itself are BGR and an unused byte."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}

    def paint(self, placed: Placed, *, slot: int = 0) -> np.ndarray:
        canvas = self._buffer(f"canvas {slot}", (placed.canvas_wh[1], placed.canvas_wh[0], 4))
        is_warped = placed.is_mosaic or not np.array_equal(placed.matrix_33, np.eye(3))
        x1, y1, x2, y2 = region = (
            region_seen(placed.matrix_33, placed.canvas_wh, placed.out_wh)
            if is_warped and not placed.copied and not placed.perspective
            else (0, 0, *placed.canvas_wh)
        )
        part = canvas[y1:y2, x1:x2]
        for gx1, gy1, gx2, gy2 in gaps(region, placed):
            canvas.view(np.uint32)[gy1:gy2, gx1:gx2] = PADDING * 0x01010101
        for tile, (x, y) in zip(placed.tiles, placed.origin_K2.tolist(), strict=True):
            if (both := visible(tile, x - x1, y - y1, part)) is not None:
                cv2.cvtColor(both[0], cv2.COLOR_BGR2BGRA, dst=both[1])
        paste_copies(canvas, placed.copied)
        if not is_warped:
            return canvas
        out = self._buffer(f"warped {slot}", (placed.out_wh[1], placed.out_wh[0], 4))
        return warp(canvas, placed.matrix_33, placed.out_wh, perspective=placed.perspective, out=out)

    def mix(self, image: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
        # A table of all pairs would need a gather per value; in doubles, a few rows at a time, it is a stream.
        shape = (MIX_ROWS, *image.shape[1:])
        first, second = self._buffer("mix", shape, np.float64), self._buffer("mix other", shape, np.float64)
        for row in range(0, len(image), MIX_ROWS):
            rows = image[row : row + MIX_ROWS]
            a, b = first[: len(rows)], second[: len(rows)]
            np.multiply(rows, share, out=a)
            np.multiply(other[row : row + MIX_ROWS], 1 - share, out=b)
            np.add(a, b, out=a)
            np.copyto(rows, a, casting="unsafe")
        return image

    def recolor(self, image: np.ndarray, color: Color) -> np.ndarray:
        height, width = image.shape[:2]
        band_rows = max(1, BAND_PIXELS // width)
        out = self._buffer("recolored", (height, width, 3))
        hsv = self._buffer("hsv", (band_rows, width, 3))
        planes = self._buffer("planes", (3, band_rows, width))
        for row in range(0, height, band_rows):
            rows = min(band_rows, height - row)
            band, band_planes = hsv[:rows], [*planes[:, :rows]]
            cv2.cvtColor(image[row : row + rows], cv2.COLOR_BGR2HSV, dst=band)
            cv2.split(band, band_planes)
            for channel, plane in enumerate(band_planes):
                self._look_up(plane, color, channel)
            cv2.merge(band_planes, dst=band)
            cv2.cvtColor(band, cv2.COLOR_HSV2BGR, dst=out[row : row + rows])
        return out

    def deliver(self, image: np.ndarray, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        planes = [*out_CHW[::-1]]
        # OpenCV writes into arrays that fit; whether it did is looked at, since its interface does not promise it.
        written = cv2.split(image, planes)
        for plane, result in zip(planes, written, strict=True):
            if result.ctypes.data != plane.ctypes.data:
                plane[:] = result
        up_down, left_right = flip_2.tolist()
        if up_down or left_right:
            code = -1 if up_down and left_right else int(left_right)
            for plane in planes:
                cv2.flip(plane, code, dst=plane)

    def finish(self, image: np.ndarray, color: Color, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        with clock.stage("color"):
            image = self.recolor(image, color)
        with clock.stage("deliver"):
            self.deliver(image, flip_2, out_CHW)

    def _look_up(self, plane: np.ndarray, color: Color, channel: int) -> None:
        """Apply a colour table to a plane, in place."""
        gain, offset = float(color.gain_3[channel]), float(color.offset_3[channel])
        if math.isnan(offset):
            cv2.LUT(plane, color.table_3V[channel], dst=plane)
            return
        cv2.convertScaleAbs(plane, dst=plane, alpha=gain, beta=offset)
        if channel == 0 and gain > 1:
            over = self._buffer("over", plane.shape)
            cv2.threshold(plane, HUES - 1, HUES, cv2.THRESH_BINARY, dst=over)
            cv2.subtract(plane, over, dst=plane)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: type = np.uint8) -> np.ndarray:
        if (name, shape) not in self._buffers:
            self._buffers[name, shape] = np.empty(shape, dtype)
        return self._buffers[name, shape]


def region_seen(matrix_33: np.ndarray, canvas_wh: tuple[int, int], out_wh: tuple[int, int]) -> Region:
    """The part of the canvas that an affine warp reads, a pixel or two more on each side."""
    # Plain numbers: for four corners NumPy's calls would cost more than the copies they save.
    (a, b, c), (d, e, f) = matrix_33[:2].tolist()
    determinant = a * e - b * d
    if determinant == 0:
        return 0, 0, *canvas_wh
    corners = [(x - c, y - f) for x in (0, out_wh[0] - 1) for y in (0, out_wh[1] - 1)]
    seen_x = [(e * x - b * y) / determinant for x, y in corners]
    seen_y = [(a * y - d * x) / determinant for x, y in corners]
    (x1, x2), (y1, y2) = (
        (min(max(int(min(seen)) - 2, 0), side), min(max(int(max(seen)) + 3, 0), side))
        for seen, side in ((seen_x, canvas_wh[0]), (seen_y, canvas_wh[1]))
    )
    return x1, y1, x2, y2


def gaps(region: Region, placed: Placed) -> list[Region]:
    """Parts of a region in which no tile lies, at least; of nine tiles, which overlap, the whole region."""
    if len(placed.tiles) > 4:
        return [region]
    x1, y1, x2, y2 = region
    # Four tiles meet where the last one begins, and none reaches beyond its quarter; a single one has all to itself.
    middle_x, middle_y = placed.origin_K2[3].tolist() if len(placed.tiles) == 4 else (x2, y2)
    across, down = (x1, min(max(middle_x, x1), x2), x2), (y1, min(max(middle_y, y1), y2), y2)
    found: list[Region] = []
    for number, (tile, (x, y)) in enumerate(zip(placed.tiles, placed.origin_K2.tolist(), strict=True)):
        column, row = number % 2, number // 2
        quarter = across[column], down[row], across[column + 1], down[row + 1]
        found += around((x, y, x + tile.shape[1], y + tile.shape[0]), quarter)
    return found


def around(inner: Region, outer: Region) -> list[Region]:
    """What of the outer rectangle is not in the inner one, as rectangles above, below, left and right of it."""
    x1, y1, x2, y2 = outer
    left, right = (min(max(x, x1), x2) for x in inner[::2])
    top, bottom = (min(max(y, y1), y2) for y in inner[1::2])
    strips = ((x1, y1, x2, top), (x1, bottom, x2, y2), (x1, top, left, bottom), (right, top, x2, bottom))
    return [strip for strip in strips if strip[0] < strip[2] and strip[1] < strip[3]]
