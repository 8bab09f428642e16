"""pixels.c, compiled once for this CPU and kept in the cache folder, as functions on arrays.

There is nothing to install: whoever has a C compiler (`cc`) has it, anybody else's pictures are painted by OpenCV, to
the same bytes. A library is only ever loaded from a folder of one's own.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock

from flatout.feed.store.home import default_folder as store_folder

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("pixels.c")
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fwrapv"),
    # Rounded where OpenCV rounds; the others only allow more vector instructions.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
COMPILE_TIMEOUT_S = 60
BLOCK = 64
"""Pixels whose colours are changed at a time; rows must be whole blocks."""
TILE = np.dtype([("pixels", "u8"), ("stride", "i8"), ("x", "i4"), ("y", "i4"), ("width", "i4"), ("height", "i4")])


class NotCompiled(OSError):
    """There is no library, and why."""


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
    try:
        return Pixels(ctypes.CDLL(str(_compiled(folder or store_folder().parent / "compiled"))))
    except OSError as error:
        raise error if isinstance(error, NotCompiled) else NotCompiled(str(error)) from error


def _compiled(folder: Path) -> Path:
    """Path of the library for this source, these flags and this CPU."""
    # -march=native: a library must not be met on another CPU, in a home folder that several machines share.
    key = hashlib.sha256("\0".join((SOURCE.read_text(), *FLAGS, _cpu())).encode()).hexdigest()[:20]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _must_be_own(folder)
    path = folder / f"pixels-{key}.so"
    if not path.exists():
        # Workers start together; one of them compiles.
        with FileLock(folder / f"pixels-{key}.lock", timeout=2 * COMPILE_TIMEOUT_S):
            if not path.exists():
                _compile(path)
    _must_be_own(path)
    return path


def _compile(path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotCompiled("there is no C compiler (cc)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder, path.name)
        command = [compiler, *FLAGS, "-o", str(part), str(SOURCE), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise NotCompiled(f"{compiler} did not end within {COMPILE_TIMEOUT_S} s") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise NotCompiled(f"{compiler}: {lines[0]}")
        part.rename(path)
    logger.info("Compiled %s for this CPU: %s", SOURCE.name, path)


def _must_be_own(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotCompiled(f"{path} may be written by others")


def _cpu() -> str:
    """What the compiler looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = (line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return "\n".join([platform.machine(), *sorted(set(told))])
