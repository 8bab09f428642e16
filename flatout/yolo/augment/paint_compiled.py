"""Pixels of a sample by pixels.c: the bytes of `paint.Classic`, in a third of the time (bench/augment_cpu.py).

What it does not know (turned, sheared and tilted sheets, copies, rows that are no whole blocks) is `paint_fast`'s.
"""

import functools
import logging

import numpy as np

from flatout.profiler import clock
from flatout.yolo.augment.c_library import NotCompiled
from flatout.yolo.augment.color import Color, colors
from flatout.yolo.augment.paint import Classic, Painter, Placed
from flatout.yolo.augment.paint_fast import Fast
from flatout.yolo.augment.pixels import BLOCK, Pixels, load_pixels, scratch_bytes

logger = logging.getLogger(__name__)


class Compiled(Fast):
    """As `Fast`; one per thread."""

    def __init__(self, pixels: Pixels, *, warps: bool = True) -> None:
        """Without `warps`, OpenCV places the tiles, and only mixture and colour are compiled."""
        super().__init__()
        self._pixels = pixels
        self._warps = warps

    def paint(self, placed: Placed, *, slot: int = 0) -> np.ndarray:
        (a, b, _), (d, e, _) = placed.matrix_33[:2].tolist()
        is_turned = b != 0 or d != 0 or a * e == 0
        if not self._warps or is_turned or placed.copied or placed.perspective or placed.out_wh[0] % 2:
            return super().paint(placed, slot=slot)
        out = self._buffer(f"warped {slot}", (placed.out_wh[1], placed.out_wh[0], 4))
        scratch = self._buffer("scratch", (scratch_bytes(placed.out_wh[0], placed.canvas_wh[0]),))
        self._pixels.paint(placed.tiles, placed.origin_K2, placed.canvas_wh, placed.matrix_33, out, scratch)
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
    """A `Compiled` where there is a C compiler and its results are OpenCV's, else a `Fast`."""
    pixels, warps = library(), _equal_warps()
    return Fast() if pixels is None or warps is None else Compiled(pixels, warps=warps)


@functools.cache
def library() -> Pixels | None:
    """pixels.c, compiled if need be; None, and a word in the log, where it cannot be."""
    try:
        return load_pixels()
    except NotCompiled as error:
        logger.warning("OpenCV paints the samples, at about half the speed: pixels.c is not compiled, %s.", error)
        return None


@functools.cache
def _equal_warps() -> bool | None:
    """Whether the library's bytes are OpenCV's (True), only those after the warp are (False), or neither (None)."""
    pixels = library()
    if pixels is None:
        return None
    # OpenCV 5 does not round coordinates to 1/32 pixel; on other CPUs it may round colours otherwise.
    for warps in (True, False):
        if agrees(Compiled(pixels, warps=warps)):
            return warps
    logger.warning("OpenCV paints the samples, at about half the speed: its bytes are not those of pixels.c.")
    return None


def agrees(painter: Painter) -> bool:
    """Whether a painter gives the bytes of the classic one, for a few sheets of random tiles and colours."""
    rng = np.random.default_rng(0)
    classic, size = Classic(), BLOCK
    tiles = [rng.integers(0, 256, (48, 64, 3), np.uint8), *rng.integers(0, 256, (3, 64, 64, 3), np.uint8)]
    found, expected = np.empty((2, 3, size, size), np.uint8)
    changes = colors(1 + rng.uniform(-1, 1, (8, 3)) * (0.015, 0.7, 0.4))
    for number, change in enumerate(zip(*changes, strict=True)):
        x, y = rng.integers(size // 2, 3 * size // 2, 2).tolist()
        origin_K2 = np.array([(x - tiles[0].shape[1], y - 48), (x, y - 64), (x - 64, y), (x, y)])
        scale, (move_x, move_y) = rng.uniform(0.4, 2), rng.uniform(-size, size / 4, 2)
        matrix_33 = np.array([[scale, 0, move_x], [0, scale, move_y], [0, 0, 1]])
        placed = Placed(tiles, origin_K2, (2 * size, 2 * size), [], matrix_33, (size, size), True, False)
        flip_2 = np.array([number & 1, number >> 1 & 1], bool)
        for one, out_CHW in ((painter, found), (classic, expected)):
            image, other = one.paint(placed), one.paint(placed._replace(tiles=tiles[::-1]), slot=1)
            one.finish(one.mix(image, other, 0.4) if number % 2 else image, Color(*change), flip_2, out_CHW)
        if not np.array_equal(found, expected):
            return False
    return True
