"""Images of a run as a store keeps them: decoded and canonical once, for all workers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.defect.strips.canonical import PLANES, canonical
from flatout.defect.strips.decode import read_stored
from flatout.errors import DataError
from flatout.feed.source import DecodeError

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
