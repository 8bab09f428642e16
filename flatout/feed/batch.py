"""What the feed hands out: one step's samples, as arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step, B samples.

    Borrowed: every array is a view of a slot that is overwritten after the next `next()`. `copy()`
    makes one to keep.
    """

    epoch: int
    step: int
    num_valid: int
    """Rows from here on repeat samples to fill a padded last batch."""

    indices: np.ndarray
    """int64 [B], which samples these are (substitutes included)."""

    positions: np.ndarray
    """int64 [B], where in the epoch's order."""

    fields: Mapping[str, np.ndarray]
    """Field -> [B, *shape of this step]; Rows -> [T, width], the rows of all samples one after another."""

    counts: Mapping[str, np.ndarray]
    """Rows field -> int32 [B], rows per sample; they add up to T."""

    def __getitem__(self, name: str) -> np.ndarray:
        return self.fields[name]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.fields.values())

    def copy(self) -> "Batch":
        """A batch that owns its arrays."""
        return replace(
            self,
            indices=self.indices.copy(),
            positions=self.positions.copy(),
            fields={name: array.copy() for name, array in self.fields.items()},
            counts={name: array.copy() for name, array in self.counts.items()},
        )
