"""Canonical images as a store keeps them, from files of three planes; `pairs` has those of pairs of images.

Dimension key:  C planes (target, ref1, ref2)   H W pixels
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from flatout.defect.data.decode import read_stored
from flatout.errors import DataError
from flatout.feed import DecodeError

logger = logging.getLogger(__name__)

# The canonical form of an image, which all other code uses: float32, 0 to 255, planes target, ref1, ref2.
#
# Images are converted once, when they are decoded: converting every patch would cost more than the patch itself.

PLANES = 3
MAX_GREY = 255.0
MID_GREY = 127.5
_STORED = (PLANES, PLANES + 1)
"""Numbers of planes that a file may have; the fourth is a production mask and is dropped."""
_PLANES_FIRST_ABOVE = 4
"""The planes are the first axis if it has 3 or 4 entries and both other axes have more than this."""


def canonical(stored: np.ndarray) -> np.ndarray:
    """Convert any stored layout and range to a new, contiguous float32 [C, H, W] in 0..255; DecodeError if impossible.

    If any value of the three planes is outside of 0..255, all planes are rescaled together to 0..255; otherwise values
    are kept.
    """
    with np.errstate(over="ignore"):  # reported below
        planes_CHW = np.ascontiguousarray(planes_first(stored), dtype=np.float32)
    if np.may_share_memory(planes_CHW, stored):
        planes_CHW = planes_CHW.copy()
    low, high = float(planes_CHW.min()), float(planes_CHW.max())
    # Minimum and maximum reveal NaN and infinity; a sum would overflow on large finite values.
    if not np.isfinite(low) or not np.isfinite(high):
        raise DecodeError("it has values that are not finite. Repair the file, or remove it.")
    if low < 0 or high > MAX_GREY:
        planes_CHW -= np.float32(low)
        if high > low:
            planes_CHW /= np.float32(high - low)
            planes_CHW *= np.float32(MAX_GREY)
    return planes_CHW


def planes_first(stored: np.ndarray) -> np.ndarray:
    """The first three planes as [C, H, W], values unchanged; DecodeError if the array has no axis of planes."""
    if stored.ndim == 2:
        raise DecodeError(
            f"it is one plane of {size_text(stored.shape)} px. Expected are three planes in one file: target, ref1 and "
            "ref2. Of grey images, give pairs: a template and a test image."
        )
    if stored.ndim != 3 or stored.dtype.kind not in "uif" or stored.size == 0:
        raise DecodeError(
            f"it holds {stored.dtype} of shape {stored.shape}. Expected are the three planes target, ref1 and ref2 "
            "as numbers, in the first or in the last axis."
        )
    first, *sides = stored.shape
    if first in _STORED and min(sides) > _PLANES_FIRST_ABOVE:
        return stored[:PLANES]
    if stored.shape[2] in _STORED:
        return stored[:, :, :PLANES].transpose(2, 0, 1)
    raise DecodeError(
        f"its shape {stored.shape} has no first or last axis of 3 planes (target, ref1, ref2) or 4 (the fourth is "
        "ignored). Save the planes along one of these axes."
    )


# Image files

VERSION = "defect strips 1: float32 CHW, 0..255"
"""Part of the key under which stores keep decoded images."""


ReadPlanes = Callable[[str], np.ndarray]
"""Path -> planes, float32 [3, H, W] in 0..255."""


class Strips:
    """Image files of one size by number, float32 [3, H, W]; the items of a `flatout.feed.Store` or `DeviceStore`."""

    parameters = VERSION

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        shape_hw: tuple[int, int] | None = None,
        read: ReadPlanes | None = None,
    ) -> None:
        """`shape_hw`: the size that every image must have; None: that of the first readable image, which is decoded.

        `read`: gives the planes of a path, for images that are not files of three planes. Workers unpickle it.
        """
        self._paths = [str(path) for path in paths]
        self._read: ReadPlanes = read or read_canonical
        if read is not None:
            self.parameters = f"{VERSION}, {getattr(read, '__name__', read)!r}"
        self.equal_planes = ""
        """Path of the first readable image, if it was decoded here and its planes are equal; else empty."""
        self.faint = ""
        """The same for an image with values in 0..1."""
        self.shape_hw = shape_hw or self._shape_of_first()

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.decode(index)

    def path(self, index: int) -> str:
        return self._paths[index]

    def where(self, index: int) -> str:
        return self._paths[index]

    @property
    def item_bytes(self) -> int:
        """Bytes of one decoded image."""
        height, width = self.shape_hw
        return PLANES * height * width * 4

    def decode(self, index: int) -> np.ndarray:
        planes_CHW = self._read(self._paths[index])
        if planes_CHW.shape[1:] != self.shape_hw:
            # The patch grid of another size would silently crop at wrong positions.
            raise DecodeError(
                f"{self._paths[index]}: it has {size_text(planes_CHW.shape[1:])} pixels (width x height), the first "
                f"image of this run {size_text(self.shape_hw)}. All images of a run must have one size: "
                "crop or resize it, or move it to another folder."
            )
        return planes_CHW

    def _shape_of_first(self) -> tuple[int, int]:
        if not self._paths:
            raise DataError("There are no images. Check the data path.")
        errors: list[Exception] = []
        for path in self._paths:
            try:
                planes_CHW = self._read(path)
            except (OSError, DecodeError) as error:
                errors.append(error)
            else:
                self.equal_planes = path if are_equal(planes_CHW) else ""
                self.faint = path if is_faint(planes_CHW) else ""
                return planes_CHW.shape[1], planes_CHW.shape[2]
        if len(errors) == 1:
            raise DataError(f"The only image cannot be read: {errors[0]}")
        raise DataError(f"None of {len(self._paths)} images can be read; the first: {errors[0]}")


def read_canonical(path: str | Path) -> np.ndarray:
    """Read a file as canonical planes, float32 [3, H, W] in 0..255; a DecodeError names the file."""
    try:
        return canonical(read_stored(path))
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from None


def are_equal(planes_CHW: np.ndarray) -> bool:
    """Whether all planes are the same, as those of a grey PNG or JPEG are."""
    middle = planes_CHW.shape[1] // 2  # nearly always differs, so that the rest need not be compared
    return all(bool((part == part[:1]).all()) for part in (planes_CHW[:, middle], planes_CHW))


EQUAL_PLANES = (
    "its three planes are equal (a grey file fills all three), so target is the same as both references, and no defect "
    "can be found. Give files of three planes: target, ref1 and ref2, or pairs of a template and a test image"
)
"""What is said of an image whose planes `are_equal`."""


FAINT = "all its values are in 0..1, but 0..255 is expected: multiply them by 255"
"""What is said of an image that `is_faint`."""


def is_faint(planes_CHW: np.ndarray) -> bool:
    """Whether all values are in 0..1, as in images that were scaled for a network: nothing can be seen in them."""
    return 0 < float(planes_CHW.max()) <= 1


class BlindnessWarning:
    """Reads images, and warns once of one in which nothing can be found, because no plane shows a difference.

    May be called in several threads.
    """

    def __init__(self, read: Callable[[Path], np.ndarray], *, are_pairs: bool) -> None:
        self._read, self._are_pairs = read, are_pairs
        self._warned = Lock()
        """Taken by the first thread that warns, and never released."""

    def __call__(self, path: Path) -> np.ndarray:
        planes_CHW = self._read(path)
        if not self._warned.locked() and (reason := self._reason(planes_CHW)) and self._warned.acquire(blocking=False):
            logger.warning("%s: %s", path, reason)
        return planes_CHW

    def _reason(self, planes_CHW: np.ndarray) -> str | None:
        """Why nothing can be found; None: something may be."""
        if is_faint(planes_CHW):
            return f"{FAINT}, or no defect can be found."
        if not are_equal(planes_CHW):
            return None
        if self._are_pairs:
            return "its template shows exactly the same, so no defect can be found. Is it a copy of the test image?"
        return f"{EQUAL_PLANES}. `flatout defect check` lists all such files."


def read_mask(path: str | Path) -> np.ndarray:
    """Read a mask of any layout as bool [H, W], as `mask_of`; a DecodeError names the file."""
    try:
        return mask_of(read_stored(path))
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from None


def mask_of(stored: np.ndarray) -> np.ndarray:
    """Bool [H, W], True on defects: where any plane of the stored array is above 0; DecodeError if it is no image."""
    if stored.ndim == 3:
        stored = stored.max(axis=0 if stored.shape[0] in (1, 3, 4) and min(stored.shape[1:]) > 4 else 2)
    if stored.ndim != 2:
        raise DecodeError(
            f"the mask has shape {stored.shape}; it must be [H, W], or have its planes in the first or last axis."
        )
    return np.asarray(stored > 0)


def size_text(shape_hw: tuple[int, ...]) -> str:
    """Width x height, of a shape in the order of arrays."""
    return " x ".join(map(str, reversed(shape_hw)))


# Grey images of pairs

_BRIGHTNESS_BGR = np.array([0.114, 0.587, 0.299])
PAIR_ENDINGS = (".bmp", ".jpg", ".jpeg", ".png", ".tif", ".tiff")
"""Endings of the files that images of pairs, and masks, may be in."""


def grey(stored: np.ndarray) -> np.ndarray:
    """A decoded image as grey, [H, W]; colours are weighted as OpenCV does."""
    if stored.ndim == 2:
        return np.asarray(stored)
    if (stored == stored[:, :, :1]).all():
        return np.asarray(stored[:, :, 0])
    brightness_HW = stored[:, :, :3] @ _BRIGHTNESS_BGR
    rounded_HW = brightness_HW if stored.dtype.kind == "f" else np.round(brightness_HW)
    return np.asarray(rounded_HW.astype(stored.dtype))


def image_files(folder: Path) -> Iterator[Path]:
    """Files in a folder that may be images, in any order; none if there is no such folder."""
    return (path for path in (folder.iterdir() if folder.is_dir() else ()) if path.suffix.lower() in PAIR_ENDINGS)
