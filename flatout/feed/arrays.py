"""Decoded items by number."""

from typing import Protocol

import numpy as np


class Arrays(Protocol):
    """Decoded items, cheap to look at: a list of arrays, or a Store."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...
