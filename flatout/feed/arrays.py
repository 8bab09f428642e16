"""Decoded items by number."""

from typing import Protocol, runtime_checkable

import numpy as np


class Arrays(Protocol):
    """Decoded items, cheap to look at: a list of arrays, or a Store."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


@runtime_checkable
class ShapedArrays(Arrays, Protocol):
    """Items of one dtype and rank that are made when they are asked for; their shapes are known before."""

    dtype: np.dtype
    shapes_ND: np.ndarray
    """int64, one row for each item."""
