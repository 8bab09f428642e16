"""Pixels of a sample by pixels.c: the bytes of `paint.Classic`, in a third of the time (bench/augment_cpu.py).

What it does not support (rotated, sheared and tilted canvases, copies, rows that are not whole blocks) is left to the
fast painter of paint.py.

Dimension key:  K tiles of a canvas   H W output   C channels, RGB   V the 256 values of a byte
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.clock import clock
from flatout.yolo.augment.c_library import NotCompiled, load_library
from flatout.yolo.augment.draw import Color, colors
from flatout.yolo.augment.paint import Classic, Fast, Painter, PreparedCanvas

logger = logging.getLogger(__name__)

# pixels.c as functions on arrays. Where it cannot be compiled, OpenCV paints the same bytes.

SOURCE = Path(__file__).with_name("pixels.c")
BLOCK = 64
"""Pixels that are recoloured at a time; rows must be whole blocks."""
TILE = np.dtype([("pixels", "u8"), ("stride", "i8"), ("x", "i4"), ("y", "i4"), ("width", "i4"), ("height", "i4")])


def scratch_bytes(width: int, canvas_w: int) -> int:
    """Bytes of scratch memory that `Pixels.paint` needs."""
    return 8 * width + 12 * (canvas_w + 8)


class Pixels:
    """The functions of pixels.c. They have no state, so threads may share them.

    Arrays must have the dtypes and layouts that are documented; they are not checked.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        integer, pointer = ctypes.c_int32, ctypes.c_void_p
        signatures = {
            "paint": (pointer, integer, integer, integer, pointer, pointer, integer, integer, pointer),
            "mix": (pointer, pointer, ctypes.c_int64, ctypes.c_double),
            "recolor": (pointer, integer, integer, pointer, pointer, integer, integer, pointer),
        }
        for name, types in signatures.items():
            getattr(library, name).argtypes = types
            getattr(library, name).restype = None
        self._library = library

    def paint(
        self,
        tiles: Sequence[np.ndarray],
        origin_K2: np.ndarray,
        canvas_wh: tuple[int, int],
        matrix_33: np.ndarray,
        out_HW4: np.ndarray,
        scratch: np.ndarray,
    ) -> None:
        """Paint tiles uint8 [h, w, 3] at x, y on a canvas, scaled and translated, into `out_HW4`, uint8, of even width.

        `matrix_33`: float64, contiguous, canvas pixel to output pixel, without rotation and shear. `scratch`: uint8, of
        `scratch_bytes`, used during the call only.
        """
        height, width = out_HW4.shape[:2]
        # Rows may have gaps between them, pixels of a row may not.
        rows = [tile if tile.strides[1:] == (3, 1) else np.ascontiguousarray(tile) for tile in tiles]
        records_K = np.array(
            [
                (tile.ctypes.data, tile.strides[0], x, y, tile.shape[1], tile.shape[0])
                for tile, (x, y) in zip(rows, origin_K2.tolist(), strict=True)
            ],
            TILE,
        )
        self._library.paint(
            *(records_K.ctypes.data, len(rows), *canvas_wh, matrix_33.ctypes.data),
            *(out_HW4.ctypes.data, width, height, scratch.ctypes.data),
        )

    def mix(self, image: np.ndarray, other: np.ndarray, share: float) -> None:
        """`image` * share + `other` * (1 - share), truncated, in place; both uint8, contiguous, of one size."""
        self._library.mix(image.ctypes.data, other.ctypes.data, image.size, share)

    def recolor(
        self, image_HW4: np.ndarray, gain_3: np.ndarray, table_3V: np.ndarray, flip_2: np.ndarray, out_CHW: np.ndarray
    ) -> None:
        """Map hue, saturation and value by tables, flip, write RGB planes; uint8, contiguous, rows of whole blocks."""
        height, width = image_HW4.shape[:2]
        self._library.recolor(
            *(image_HW4.ctypes.data, width, height, gain_3.ctypes.data, table_3V.ctypes.data),
            *(int(flip_2[0]), int(flip_2[1]), out_CHW.ctypes.data),
        )


def load_pixels(folder: Path | None = None) -> Pixels:
    """Load pixels.c from `folder` (default: in the cache folder), compiling it first if needed. Raises NotCompiled."""
    return Pixels(load_library(SOURCE, folder))


class Compiled(Fast):
    """As `Fast`, with pixels.c where it supports the canvas; one per thread."""

    def __init__(self, pixels: Pixels, *, warps: bool = True) -> None:
        """Without `warps`, OpenCV warps the canvas, and only mixing and recolouring are compiled."""
        super().__init__()
        self._pixels = pixels
        self._warps = warps

    def paint(self, prepared: PreparedCanvas, *, layer: int = 0) -> np.ndarray:
        (a, b, _), (d, e, _) = prepared.matrix_33[:2].tolist()
        is_rotated = b != 0 or d != 0 or a * e == 0
        if not self._warps or is_rotated or prepared.copied or prepared.perspective or prepared.out_wh[0] % 2:
            return super().paint(prepared, layer=layer)
        out = self._buffer(f"warped {layer}", (prepared.out_wh[1], prepared.out_wh[0], 4))
        scratch = self._buffer("scratch", (scratch_bytes(prepared.out_wh[0], prepared.canvas_wh[0]),))
        self._pixels.paint(prepared.tiles, prepared.origin_K2, prepared.canvas_wh, prepared.matrix_33, out, scratch)
        return out

    def mix(self, image: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
        self._pixels.mix(image, other, share)
        return image

    def finish(self, image: np.ndarray, color: Color, flip_2: np.ndarray, out_CHW: np.ndarray) -> None:
        if image.shape[1] % BLOCK or not out_CHW.flags.c_contiguous:
            super().finish(image, color, flip_2, out_CHW)
            return
        with clock.stage("color"):
            self._pixels.recolor(image, color.gain_3, color.table_3V, flip_2, out_CHW)


def fastest_painter() -> Painter:
    """A `Compiled` where pixels.c can be compiled and its results equal OpenCV's, else a `Fast`."""
    pixels, warps = pixels_library(), _equal_warps()
    return Fast() if pixels is None or warps is None else Compiled(pixels, warps=warps)


@functools.cache
def pixels_library() -> Pixels | None:
    """pixels.c, compiled if needed; None, with a warning, where it cannot be."""
    try:
        return load_pixels()
    except NotCompiled as error:
        logger.warning("pixels.c is not compiled (%s): OpenCV paints the samples at about half the speed.", error)
        return None


@functools.cache
def _equal_warps() -> bool | None:
    """Whether the library's bytes equal OpenCV's (True), equal them but for the warp (False), or differ (None)."""
    pixels = pixels_library()
    if pixels is None:
        return None
    # OpenCV 5 does not round coordinates to 1/32 pixel; on other CPUs it may round colours differently.
    for warps in (True, False):
        if matches_classic(Compiled(pixels, warps=warps)):
            return warps
    logger.warning("pixels.c disagrees with OpenCV and is not used: OpenCV paints the samples at about half the speed.")
    return None


def matches_classic(painter: Painter) -> bool:
    """Whether a painter gives the bytes of the classic one, for a few canvases of random tiles and colours."""
    rng = np.random.default_rng(0)
    classic, size = Classic(), BLOCK
    tiles = [rng.integers(0, 256, (48, 64, 3), np.uint8), *rng.integers(0, 256, (3, 64, 64, 3), np.uint8)]
    found, expected = np.empty((2, 3, size, size), np.uint8)
    changes = colors({"hsv": 1 + rng.uniform(-1, 1, (8, 3)) * (0.015, 0.7, 0.4)})
    for number, change in enumerate(zip(*changes, strict=True)):
        x, y = rng.integers(size // 2, 3 * size // 2, 2).tolist()
        origin_K2 = np.array([(x - tiles[0].shape[1], y - 48), (x, y - 64), (x - 64, y), (x, y)])
        scale, (move_x, move_y) = rng.uniform(0.4, 2), rng.uniform(-size, size / 4, 2)
        matrix_33 = np.array([[scale, 0, move_x], [0, scale, move_y], [0, 0, 1]])
        prepared = PreparedCanvas(tiles, origin_K2, (2 * size, 2 * size), [], matrix_33, (size, size), True, False)
        flip_2 = np.array([number & 1, number >> 1 & 1], bool)
        for one, out_CHW in ((painter, found), (classic, expected)):
            image, other = one.paint(prepared), one.paint(prepared._replace(tiles=tiles[::-1]), layer=1)
            one.finish(one.mix(image, other, 0.4) if number % 2 else image, Color(*change), flip_2, out_CHW)
        if not np.array_equal(found, expected):
            return False
    return True
