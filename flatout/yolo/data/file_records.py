"""The state of files, and a record of each of them, made by the workers of a feed."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flatout.feed import Field, SampleSource


def stat_of(path: str) -> os.stat_result | None:
    """The state of a file; None if there is none, or none can have this name."""
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


class FileRecords(SampleSource):
    """The record `make(item)` of each file as a sample, and one more sample that touches no file.

    The feed replaces a sample that crashes its worker by another one, so at least one must be harmless.
    """

    def __init__(self, paths: Sequence[str], items: Sequence[Any], make: Callable[[Any], Any], dtype: np.dtype) -> None:
        """`paths` name the items in messages."""
        self.fields = {"record": Field((), dtype)}
        self._paths, self._items, self._make, self._dtype = paths, items, make, dtype

    def __len__(self) -> int:
        return len(self._items) + 1

    def where(self, index: int) -> str:
        return self._paths[index] if index < len(self._items) else "no image"

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        record = np.zeros((), self._dtype)
        if index < len(self._items):
            record[()] = self._make(self._items[index])
        return {"record": record}
