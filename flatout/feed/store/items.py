"""What a store keeps: anything whose items decode to arrays."""

from typing import Protocol

import numpy as np

from flatout.errors import DataError

KINDS = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<f4"))
"""Element types a store keeps; their position is their code in a store file."""
MOST_DIMS = 6


class Items(Protocol):
    """Input files and how to decode them. Plain attributes only: it is pickled for workers.

    class Photos:
        parameters = "cv2 BGR, longest side 640"

        def __init__(self, paths): self.paths = paths
        def __len__(self): return len(self.paths)
        def path(self, index): return self.paths[index]
        def where(self, index): return self.paths[index]
        def decode(self, index): return decode_and_shrink(self.paths[index], 640)
    """

    @property
    def parameters(self) -> str:
        """Everything but the input files that decides what `decode` returns: sizes, colours, decoder, your version."""

    def __len__(self) -> int: ...

    def path(self, index: int) -> str:
        """The input file of an item; several items may come from one file."""

    def decode(self, index: int) -> np.ndarray:
        """uint8, uint16 or float32 of any shape up to 6 dimensions; the same for every call.

        Raises OSError or DecodeError for a file that cannot be read; anything else counts as a bug.
        """

    def where(self, index: int) -> str:
        """The file (or key) of an item, for error texts."""


def decode_item(items: Items, index: int) -> np.ndarray:
    """An item as every store hands it out: read-only, contiguous, little-endian; refuses what no store can keep."""
    array = np.asarray(items.decode(index), order="C")
    kind = array.dtype.newbyteorder("<")
    if kind not in KINDS or array.ndim > MOST_DIMS:
        raise DataError(
            f"{items.where(index)}: decode() returned {array.dtype} {array.shape}. A store keeps uint8, uint16 or "
            f"float32 of up to {MOST_DIMS} dimensions: convert it in decode()."
        )
    array = array.astype(kind, copy=False).view()
    array.flags.writeable = False
    return array
