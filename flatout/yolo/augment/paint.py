"""Pixels of a sample in OpenCV: the classic painter, the fast painter, and objects pasted in.

Both painters give the same bytes; paint_compiled.py has a third, which is faster still. Images are uint8 [h, w, 3],
BGR, until they are delivered.

Dimension key:  K tiles of a canvas, or attempts to paste   T labels   C H W channels (RGB), height and width
                3 hue, saturation, value   V the 256 values of a byte
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import cv2
import numpy as np

from flatout.clock import clock
from flatout.yolo.augment.draw import HUES, Color
from flatout.yolo.augment.paste import ENOUGH_OBJECTS, MIN_VALUES, PasteArea, fit_into, paste_all
from flatout.yolo.data.letterbox import PADDING


class PreparedCanvas(NamedTuple):
    """One canvas with the pixels of its tiles, ready to be painted."""

    tiles: list[np.ndarray]
    origin_K2: np.ndarray
    """int64: x, y of each tile's first pixel on the canvas."""
    canvas_wh: tuple[int, int]
    copied: list[np.ndarray]
    """Polygons to paste again, mirrored, in canvas pixels."""
    matrix_33: np.ndarray
    out_wh: tuple[int, int]
    is_mosaic: bool
    perspective: bool


class Painter(Protocol):
    """Paints samples. The result of a method may be overwritten by the next call of the same method."""

    def paint(self, prepared: PreparedCanvas, *, layer: int = 0) -> np.ndarray:
        """The canvas, warped. `layer` is 0 or 1: the results of a sample's two canvases are kept at the same time."""

    def mix(self, image: np.ndarray, other: np.ndarray, share: float) -> np.ndarray: ...

    def recolor(self, image: np.ndarray, color: Color) -> np.ndarray:
        """Change hue, saturation and value; returns BGR."""

    def deliver(self, image: np.ndarray, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        """Flip and write as RGB planes."""

    def finish(self, image: np.ndarray, color: Color, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        """`recolor` and `deliver` in one, for samples into which nothing is pasted in between."""
        with clock.stage("color"):
            image = self.recolor(image, color)
        with clock.stage("deliver"):
            self.deliver(image, flip_2, out_CHW)


class Classic(Painter):
    """The reference: one OpenCV call after the other, each into a new image."""

    def paint(self, prepared: PreparedCanvas, *, layer: int = 0) -> np.ndarray:
        with clock.stage("mosaic"):
            canvas = compose(prepared.tiles, prepared.origin_K2, prepared.canvas_wh)
            paste_copies(canvas, prepared.copied)
        if not prepared.is_mosaic and np.array_equal(prepared.matrix_33, np.eye(3)):
            return canvas
        return warp(canvas, prepared.matrix_33, prepared.out_wh, perspective=prepared.perspective)

    def mix(self, image: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
        return np.asarray((image * share + other * (1 - share)).astype(np.uint8))

    def recolor(self, image: np.ndarray, color: Color) -> np.ndarray:
        planes = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
        hsv = cv2.merge([cv2.LUT(plane, table_V) for plane, table_V in zip(planes, color.table_3V, strict=True)])
        return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR))

    def deliver(self, image: np.ndarray, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        up_down, left_right = flip_2
        image = image[::-1] if up_down else image
        image = image[:, ::-1] if left_right else image
        out_CHW[:] = image[..., ::-1].transpose(2, 0, 1)


def compose(tiles: list[np.ndarray], origin_K2: np.ndarray, canvas_wh: tuple[int, int]) -> np.ndarray:
    """Tiles on a grey canvas, clipped at its borders, later ones over earlier ones."""
    canvas = np.full((canvas_wh[1], canvas_wh[0], 3), PADDING, np.uint8)
    for tile, (x, y) in zip(tiles, origin_K2.tolist(), strict=True):
        if (both := overlap(tile, x, y, canvas)) is not None:
            both[1][:] = both[0]
    return canvas


def paste_copies(canvas: np.ndarray, polygons: Sequence[np.ndarray]) -> None:
    """Paste the polygons' pixels, mirrored left to right, over the canvas uint8 [h, w, 3]; zero values do not cover."""
    if not polygons:
        return
    mask = np.zeros(canvas.shape[:2], np.uint8)
    for polygon in polygons:
        cv2.drawContours(mask, [polygon.astype(np.int32)], -1, 1, cv2.FILLED)
    mirrored = cv2.flip(cv2.bitwise_and(canvas, canvas, mask=mask), 1)
    np.copyto(canvas, mirrored, where=mirrored > 0)


def overlap(tile: np.ndarray, x: int, y: int, canvas: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The part of a tile at x, y that lies on the canvas, and the part of the canvas under it; None if empty."""
    x1, y1 = max(x, 0), max(y, 0)
    x2, y2 = min(x + tile.shape[1], canvas.shape[1]), min(y + tile.shape[0], canvas.shape[0])
    if x1 >= x2 or y1 >= y2:
        return None
    return tile[y1 - y : y2 - y, x1 - x : x2 - x], canvas[y1:y2, x1:x2]


def warp(
    canvas: np.ndarray,
    matrix_33: np.ndarray,
    out_wh: tuple[int, int],
    *,
    perspective: bool,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The canvas warped by a matrix (canvas pixel to output pixel), bilinear, with grey around it."""
    if perspective:
        return np.asarray(cv2.warpPerspective(canvas, matrix_33, out_wh, dst=out, borderValue=(PADDING,) * 4))
    return np.asarray(cv2.warpAffine(canvas, matrix_33[:2], out_wh, dst=out, borderValue=(PADDING,) * 4))


# The fast painter: the same bytes as `Classic`, in reused buffers.
#
# Times are measured in bench/augment_cpu.py. What is saved compared with `Classic`: only the part of a canvas that the
# warp reads is written, and grey only where no tile lies; pixels have four bytes until their colours change, which
# OpenCV warps faster than three; colour tables that are a plain scaling are applied as one, with vector instructions;
# nothing is allocated, and the planes of the result are written directly into the batch.

BAND_PIXELS = 51200
"""Pixels that are recoloured at a time, so that they stay in a core's cache."""
MIX_ROWS = 16

Region = tuple[int, int, int, int]
"""x1, y1, x2, y2 in canvas pixels."""


class Fast(Painter):
    """Paints with one set of buffers, so use one per thread. Images between its methods are BGR and an unused byte."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}

    def paint(self, prepared: PreparedCanvas, *, layer: int = 0) -> np.ndarray:
        canvas = self._buffer(f"canvas {layer}", (prepared.canvas_wh[1], prepared.canvas_wh[0], 4))
        is_warped = prepared.is_mosaic or not np.array_equal(prepared.matrix_33, np.eye(3))
        x1, y1, x2, y2 = region = (
            visible_region(prepared.matrix_33, prepared.canvas_wh, prepared.out_wh)
            if is_warped and not prepared.copied and not prepared.perspective
            else (0, 0, *prepared.canvas_wh)
        )
        part = canvas[y1:y2, x1:x2]
        for gx1, gy1, gx2, gy2 in uncovered_regions(region, prepared):
            canvas.view(np.uint32)[gy1:gy2, gx1:gx2] = PADDING * 0x01010101
        for tile, (x, y) in zip(prepared.tiles, prepared.origin_K2.tolist(), strict=True):
            if (both := overlap(tile, x - x1, y - y1, part)) is not None:
                cv2.cvtColor(both[0], cv2.COLOR_BGR2BGRA, dst=both[1])
        paste_copies(canvas, prepared.copied)
        if not is_warped:
            return canvas
        out = self._buffer(f"warped {layer}", (prepared.out_wh[1], prepared.out_wh[0], 4))
        return warp(canvas, prepared.matrix_33, prepared.out_wh, perspective=prepared.perspective, out=out)

    def mix(self, image: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
        # A table of all pairs would need a gather per value; doubles, a few rows at a time, are streamed.
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
                self._apply_table(plane, color, channel)
            cv2.merge(band_planes, dst=band)
            cv2.cvtColor(band, cv2.COLOR_HSV2BGR, dst=out[row : row + rows])
        return out

    def deliver(self, image: np.ndarray, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        planes = [*out_CHW[::-1]]
        # OpenCV writes into arrays of the right shape. Its interface does not promise that, so it is checked.
        written = cv2.split(image, planes)
        for plane, result in zip(planes, written, strict=True):
            if result.ctypes.data != plane.ctypes.data:
                plane[:] = result
        up_down, left_right = flip_2.tolist()
        if up_down or left_right:
            code = -1 if up_down and left_right else int(left_right)
            for plane in planes:
                cv2.flip(plane, code, dst=plane)

    def _apply_table(self, plane: np.ndarray, color: Color, channel: int) -> None:
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


def visible_region(matrix_33: np.ndarray, canvas_wh: tuple[int, int], out_wh: tuple[int, int]) -> Region:
    """The part of the canvas that an affine warp reads, with a pixel or two of margin on each side."""
    # In plain Python: for four corners, NumPy calls would cost more than the copies they save.
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


def uncovered_regions(region: Region, prepared: PreparedCanvas) -> list[Region]:
    """Rectangles that cover all pixels of a region without a tile; the whole region for nine tiles, which overlap."""
    if len(prepared.tiles) > 4:
        return [region]
    x1, y1, x2, y2 = region
    # Four tiles meet at the origin of the last, and none reaches beyond its quarter; one tile has the whole region.
    middle_x, middle_y = prepared.origin_K2[3].tolist() if len(prepared.tiles) == 4 else (x2, y2)
    across, down = (x1, min(max(middle_x, x1), x2), x2), (y1, min(max(middle_y, y1), y2), y2)
    found: list[Region] = []
    for number, (tile, (x, y)) in enumerate(zip(prepared.tiles, prepared.origin_K2.tolist(), strict=True)):
        column, row = number % 2, number // 2
        quarter = across[column], down[row], across[column + 1], down[row + 1]
        found += strips_around((x, y, x + tile.shape[1], y + tile.shape[0]), quarter)
    return found


def strips_around(inner: Region, outer: Region) -> list[Region]:
    """The outer rectangle without the inner one, as rectangles above, below, left and right of it."""
    x1, y1, x2, y2 = outer
    left, right = (min(max(x, x1), x2) for x in inner[::2])
    top, bottom = (min(max(y, y1), y2) for y in inner[1::2])
    strips = ((x1, y1, x2, top), (x1, bottom, x2, y2), (x1, top, left, bottom), (right, top, x2, bottom))
    return [strip for strip in strips if strip[0] < strip[2] and strip[1] < strip[3]]


# Objects cut out of other mosaics along their polygons, pasted into a finished image where they cover little.


class CutOut(NamedTuple):
    """An object without its background."""

    class_number: float
    image: np.ndarray
    """uint8 [h, w, 3], BGR; 0 outside of its polygon."""


def cut_out(canvas: np.ndarray, class_T: np.ndarray, box_T4: np.ndarray, polygons: list[np.ndarray]) -> list[CutOut]:
    """Objects of a canvas uint8 [h, w, 3], without empty ones. Zero values inside of a polygon become 255."""
    height, width = canvas.shape[:2]
    found = []
    for class_number, box_4, polygon in zip(class_T, box_T4, polygons, strict=True):
        # Clipped to the last pixel, which is then left out: a quirk of YOLOv7, pinned by golden paste.npz.
        x1, y1, x2, y2 = (int(value) for value in box_4.clip(0, (width - 1, height - 1) * 2))
        if x2 <= x1 or y2 <= y1:
            continue
        mask = np.zeros((height, width), np.uint8)
        cv2.drawContours(mask, [polygon.astype(np.int32)], -1, 255, cv2.FILLED)
        inside = mask[y1:y2, x1:x2, None] > 0
        image = np.where(inside & (canvas[y1:y2, x1:x2] > 0), canvas[y1:y2, x1:x2], inside.astype(np.uint8) * 255)
        found.append(CutOut(float(class_number), np.ascontiguousarray(image)))
    return found


def collect_cut_outs(rounds: Iterable[list[CutOut]]) -> list[CutOut]:
    """Cut-outs of one round after the other, until there are enough; none if the first round has none."""
    found: list[CutOut] = []
    for of_round in rounds:
        found += of_round
        if not found or len(found) >= ENOUGH_OBJECTS:
            break
    return found


def paste_in(image: np.ndarray, label_T5: np.ndarray, cut_outs: list[CutOut], tries_K6: np.ndarray) -> np.ndarray:
    """Paste into uint8 [h, w, 3] in place; returns labels (class, corners in pixels) float32 [T + pasted, 5]."""

    def paste(number: int, area: PasteArea) -> tuple[int, int] | None:
        x1, y1, x2, y2 = area
        return _paste_one(image[y1:y2, x1:x2], cut_outs[number].image)

    classes = [cut.class_number for cut in cut_outs]
    return paste_all((image.shape[1], image.shape[0]), label_T5, classes, tries_K6, paste)


def _paste_one(part: np.ndarray, cut: np.ndarray) -> tuple[int, int] | None:
    """Fit a cut-out into a part of the image; its width and height there, or None if too little of it is left."""
    wh = fit_into((0, 0, part.shape[1], part.shape[0]), (cut.shape[1], cut.shape[0]))
    if wh is None:
        return None
    resized = cv2.resize(cut, wh)
    is_set = resized > 0
    if np.count_nonzero(is_set) <= MIN_VALUES:
        return None
    np.copyto(part[: wh[1], : wh[0]], resized, where=is_set)
    return wh
