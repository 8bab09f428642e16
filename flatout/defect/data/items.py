"""Images of a run as a store keeps them: canonical, from files of three planes or from pairs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.defect.data.decode import read_stored
from flatout.errors import DataError
from flatout.feed import DecodeError

# The one form in which all later code sees an image: float32, 0 to 255, planes target, ref1, ref2.
#
# Done once per image, when it is decoded: per patch it would cost more than the patch itself.
#
# Dimension key:  C planes (target, ref1, ref2)   H W pixels

PLANES = 3
TOP = 255.0
MIDDLE = 127.5
_STORED = (PLANES, PLANES + 1)
"""Planes a file may have; the fourth is a production mask and is dropped."""
_PLANES_FIRST_ABOVE = 4
"""An array whose other sides are larger than this and whose first is 3 or 4 has its planes first."""


def canonical(stored: np.ndarray) -> np.ndarray:
    """Any stored layout and range -> float32 [C, H, W] in 0..255, contiguous and new; DecodeError if it is no image.

    Values outside of 0..255 anywhere in the three planes stretch all of them together; others stay as they are.
    """
    with np.errstate(over="ignore"):  # told below
        planes_CHW = np.ascontiguousarray(planes_first(stored), dtype=np.float32)
    if planes_CHW.base is stored or planes_CHW is stored:
        planes_CHW = planes_CHW.copy()
    low, high = float(planes_CHW.min()), float(planes_CHW.max())
    # A sum would overflow on large finite values; extremes of an image with NaN are NaN.
    if not np.isfinite(low) or not np.isfinite(high):
        raise DecodeError("it has values that are not finite. Mend the file, or leave it out.")
    if low < 0 or high > TOP:
        _stretch(planes_CHW, low, high)
    return planes_CHW


def _stretch(planes_CHW: np.ndarray, low: float, high: float) -> None:
    if high <= low:
        planes_CHW.fill(0)
        return
    planes_CHW -= np.float32(low)
    planes_CHW /= np.float32(high - low)
    planes_CHW *= np.float32(TOP)


def planes_first(stored: np.ndarray) -> np.ndarray:
    """The first three planes [C, H, W], before anything looks at their values; DecodeError if there are none."""
    if stored.ndim != 3 or stored.dtype.kind not in "uif" or stored.size == 0:
        raise DecodeError(
            f"it holds {stored.dtype} of shape {stored.shape}. RunRequest are the three planes target, ref1 and ref2 "
            "as numbers, in the first or in the last axis."
        )
    first, *sides = stored.shape
    if first in _STORED and min(sides) > _PLANES_FIRST_ABOVE:
        return stored[:PLANES]
    if stored.shape[2] in _STORED:
        return stored[:, :, :PLANES].transpose(2, 0, 1)
    raise DecodeError(f"it has shape {stored.shape}, which has no axis of 3 or 4 planes (target, ref1, ref2).")


VERSION = "defect strips 1: float32 CHW, 0..255"


class Strips:
    """Image files of one size, by number; float32 [3, H, W]. Fits `flatout.feed.Store` and `DeviceStore`."""

    parameters = VERSION

    def __init__(self, paths: Sequence[str | Path], *, shape_hw: tuple[int, int] | None = None) -> None:
        """`shape_hw`: what every image must measure; None: as the first one that can be read, which is decoded now."""
        self._paths = [str(path) for path in paths]
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
        """Of one decoded image."""
        height, width = self.shape_hw
        return PLANES * height * width * 4

    def decode(self, index: int) -> np.ndarray:
        planes_CHW = read_canonical(self._paths[index])
        if planes_CHW.shape[1:] != self.shape_hw:
            # Cropped at the places of another size, it would be trained on silently shifted.
            raise DecodeError(
                f"{self._paths[index]}: it measures {_size(planes_CHW.shape[1:])}, the first image of this run "
                f"{_size(self.shape_hw)}. All images of a run have one size."
            )
        return planes_CHW

    def _shape_of_first(self) -> tuple[int, int]:
        if not self._paths:
            raise DataError("There are no images. Check the data path.")
        errors: list[Exception] = []
        for path in self._paths:
            try:
                _, height, width = read_canonical(path).shape
            except (OSError, DecodeError) as error:
                errors.append(error)
            else:
                return height, width
        raise DataError(f"None of {len(self._paths)} images can be read; the first: {errors[0]}")


def read_canonical(path: str | Path) -> np.ndarray:
    """float32 [3, H, W] in 0..255 of a file; DecodeError names it."""
    try:
        return canonical(read_stored(path))
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from None


def read_mask(path: str | Path) -> np.ndarray:
    """bool [H, W]: True on defects. Any layout; several planes count as one where all of them are equal or not."""
    stored = read_stored(path)
    if stored.ndim == 3:
        stored = stored.max(axis=0 if stored.shape[0] in (1, 3, 4) and min(stored.shape[1:]) > 4 else 2)
    if stored.ndim != 2:
        raise DecodeError(f"{path}: a mask of shape {stored.shape} is no picture.")
    return np.asarray(stored > 0)


def _size(shape_hw: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape_hw))


# Pairs of an inspected picture and a defect-free template as images of three planes.
#
#     P/temp/ID.*   template          P/test/ID.*   inspected board          P/mask/ID.*   its defects, where known
#
# There is only one template, so it serves as both references: ref2 is ref1 again. For training, whose defects are
# painted, the template is target as well, and the recipe's shift and noise tell the planes apart.

_BRIGHTNESS_BGR = np.array([0.114, 0.587, 0.299])
_KINDS = (".jpg", ".jpeg", ".png", ".tif", ".tiff")


class Pair(NamedTuple):
    """Files of one board."""

    name: str
    template: Path
    inspected: Path
    mask: Path | None


def list_pairs(folder: Path) -> list[Pair]:
    """Pairs of a folder with temp/ and test/, sorted by name; DataError if one has no partner, or there are none."""
    templates, inspected, masks = (_by_stem(folder / name) for name in ("temp", "test", "mask"))
    if not inspected:
        raise DataError(f"{folder}: there are no pictures in {folder / 'test'}.")
    if lonely := sorted(inspected.keys() - templates.keys()):
        raise DataError(f"{inspected[lonely[0]]}: it has no template of the same name in {folder / 'temp'}.")
    return [Pair(name, templates[name], inspected[name], masks.get(name)) for name in sorted(inspected)]


def read_pair(pair: Pair, *, align_px: int = 0) -> np.ndarray:
    """Planes target (inspected), ref1 and ref2 (the template), uint8 [3, H, W].

    `align_px`: move the template by up to so many whole pixels to where it fits best.
    """
    target, reference = _grey(pair.inspected), _grey(pair.template)
    if target.shape != reference.shape:
        raise DecodeError(f"{pair.inspected}: it measures {target.shape}, its template {reference.shape}.")
    if align_px:
        reference = moved(reference, best_shift(target, reference, align_px))
    return np.stack((target, reference, reference))


def best_shift(target_HW: np.ndarray, reference_HW: np.ndarray, most_px: int) -> tuple[int, int]:
    """(dy, dx) by which the reference has to be moved to differ least from target; of equal ones the smallest.

    Every whole shift is tried on what all of them have in common: sums over a picture hardly see defects.
    """
    height, width = target_HW.shape
    inner = target_HW[most_px : height - most_px, most_px : width - most_px].astype(np.int16)
    side = range(-most_px, most_px + 1)
    shifts = sorted(((dy, dx) for dy in side for dx in side), key=lambda shift: abs(shift[0]) + abs(shift[1]))

    def difference(shift: tuple[int, int]) -> int:
        top, left = most_px - shift[0], most_px - shift[1]
        part = reference_HW[top : top + inner.shape[0], left : left + inner.shape[1]]
        return int(np.abs(inner - part).sum())

    return min(shifts, key=difference)


def moved(plane_HW: np.ndarray, shift_yx: tuple[int, int]) -> np.ndarray:
    """A plane moved down and to the right by whole pixels; its edge is repeated."""
    rows, columns = (
        np.clip(np.arange(length) - by, 0, length - 1) for length, by in zip(plane_HW.shape, shift_yx, strict=True)
    )
    return np.asarray(plane_HW[rows[:, None], columns])


def read_template(pair: Pair) -> np.ndarray:
    """The template in all three planes, uint8 [3, H, W]: what synthetic defects are painted on."""
    return np.stack([_grey(pair.template)] * 3)


def _grey(path: Path) -> np.ndarray:
    """uint8 [H, W]; of a coloured picture its brightness, as OpenCV weighs it."""
    stored = read_stored(path)
    if stored.ndim == 2:
        return np.asarray(stored)
    if (stored == stored[:, :, :1]).all():
        return np.asarray(stored[:, :, 0])
    return np.asarray(np.round(stored[:, :, :3] @ _BRIGHTNESS_BGR).astype(np.uint8))


def _by_stem(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in _pictures(folder)}


def _pictures(folder: Path) -> Iterator[Path]:
    return (path for path in (folder.iterdir() if folder.is_dir() else ()) if path.suffix.lower() in _KINDS)
