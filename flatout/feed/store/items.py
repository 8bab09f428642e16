"""What a store keeps: anything whose items decode to arrays."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.feed.config import plan_workers

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


# How a store is kept: every knob, none of which changes what it returns.


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How a store is kept. None of this changes what it returns."""

    place: Literal["ram", "disk", "off"] = "ram"
    """In memory for the length of a run, in a file that later runs find again, or nowhere."""

    budget_bytes: int | None = None
    """What it may take in all. None: half of the free memory, or 90 % of the free disk."""

    folder: str | Path | None = None
    """Where files, locks and records are. None: flatout/stores in the user's cache folder."""

    policy: Literal["resident", "lru"] = "resident"
    """What happens when the budget is too small: the first items stay and the others are decoded on every visit, or
    each process keeps those it used last (worse for shuffled epochs, see docs/store.md)."""

    workers: int | str = "auto"
    """Who decodes when it is built, as in FeedConfig. With policy="lru", the processes that share the budget."""

    backend: Literal["process", "thread"] = "process"
    """Threads need no pickling, but only pay off if `decode` releases the GIL."""

    verify: bool = False
    """Compare every stored byte and every input file with the checksums taken at build before using a store."""

    patience_s: float = 120
    """Another process that is building the same store is not waited for when it makes no progress for so long."""

    progress: bool = True
    """Show how far a build is."""

    def __post_init__(self) -> None:
        for name, known in {
            "place": ("ram", "disk", "off"),
            "policy": ("resident", "lru"),
            "backend": ("process", "thread"),
        }.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: use {' or '.join(map(repr, known))}.")
        if self.policy == "lru" and self.place == "disk":
            raise ConfigError("policy='lru' keeps items in each process's memory: use it with place='ram'.")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ConfigError(f"budget_bytes={self.budget_bytes} must not be negative.")
        if self.patience_s < 0:
            raise ConfigError(f"patience_s={self.patience_s} must not be negative.")
        plan_workers(self.workers)  # refuses what cannot be obeyed

    @property
    def num_workers(self) -> int:
        """Workers on this machine."""
        return plan_workers(self.workers).total
