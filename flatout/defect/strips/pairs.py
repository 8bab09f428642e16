"""Pairs of an inspected picture and a defect-free template as images of three planes.

    P/temp/ID.*   template          P/test/ID.*   inspected board          P/mask/ID.*   its defects, where known

There is only one template, so it serves as both references: ref2 is ref1 again. For training, whose defects are
painted, the template is target as well, and the recipe's shift and noise tell the planes apart.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.defect.strips.decode import read_stored
from flatout.errors import DataError
from flatout.feed.source import DecodeError

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
