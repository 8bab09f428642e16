"""pixels.c as functions on arrays. Where it cannot be compiled, pictures are painted by OpenCV, to the same bytes."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.yolo.augment.c_library import load_library

SOURCE = Path(__file__).with_name("pixels.c")
BLOCK = 64
"""Pixels whose colours are changed at a time; rows must be whole blocks."""
TILE = np.dtype([("pixels", "u8"), ("stride", "i8"), ("x", "i4"), ("y", "i4"), ("width", "i4"), ("height", "i4")])


def scratch_bytes(width: int, canvas_w: int) -> int:
    """What `Pixels.paint` needs of memory for itself."""
    return 8 * width + 12 * (canvas_w + 8)


class Pixels:
    """The functions of pixels.c, without a state: threads may share them.

    Arrays must be of the dtypes and layouts named; they are not looked at again.
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
        """Tiles uint8 [h, w, 3] at x, y on a canvas, scaled and moved into `out_HW4`, uint8; an even width.

        `matrix_33`, float64, contiguous: canvas pixel to output pixel, without turn and shear. `scratch`: uint8, of
        `scratch_bytes`, for the length of the call.
        """
        height, width = out_HW4.shape[:2]
        # Rows may lie apart; pixels of a row may not.
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
        """Hue, saturation and value through their tables, flipped, as RGB planes; uint8, contiguous, whole blocks."""
        height, width = image_HW4.shape[:2]
        self._library.recolor(
            *(image_HW4.ctypes.data, width, height, gain_3.ctypes.data, table_3V.ctypes.data),
            *(int(flip_2[0]), int(flip_2[1]), out_CHW.ctypes.data),
        )


def load_pixels(folder: Path | None = None) -> Pixels:
    """The library from `folder` (default: in the cache folder), compiled if it is not there. Raises NotCompiled."""
    return Pixels(load_library(SOURCE, folder))
