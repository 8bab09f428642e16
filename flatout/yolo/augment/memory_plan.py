"""Where the pictures of a data set will lie, from their sizes alone: before one of them is decoded.

Dimension key:  N pictures
"""

from typing import NamedTuple

import numpy as np

from flatout.feed.device_store import CHUNK_BYTES, chunks_of, settle
from flatout.yolo.augment.chroma import kept_shapes
from flatout.yolo.augment.layout import resized_wh


class Room(NamedTuple):
    """Bytes that pictures may take."""

    device_bytes: int
    pinned_bytes: int


class MemoryPlan(NamedTuple):
    """How many pictures will lie where, and the bytes that they take."""

    size: int
    subsampled: bool
    num_pictures: int
    num_resident: int
    num_pinned: int
    device_bytes: int
    pinned_bytes: int
    away_bytes: int

    def __str__(self) -> str:
        each = (self.device_bytes + self.pinned_bytes + self.away_bytes) / self.num_pictures
        how = " as 4:2:0" if self.subsampled else ""
        text = f"{self.num_pictures} pictures at {self.size} px{how}, {each:,.0f} bytes each: "
        text += f"{self.num_resident} in device memory ({self.device_bytes / 1e9:.2f} GB)"
        if self.num_pinned:
            text += f", {self.num_pinned} in pinned RAM ({self.pinned_bytes / 1e9:.2f} GB)"
        if num_away := self.num_pictures - self.num_resident - self.num_pinned:
            text += f", {num_away} brought by the workers from the host's store ({self.away_bytes / 1e9:.2f} GB)"
        return text


def plan_memory(
    size_wh_N2: np.ndarray, *, size: int, room: Room, batch_items: int, subsampled: bool = False
) -> MemoryPlan:
    """What `picture_store` will do with pictures of these sizes, kept as BGR, or with subsampled colours."""
    wh_N2 = resized_wh(size_wh_N2, size)
    chunks_N = chunks_of(kept_shapes(wh_N2).prod(1) if subsampled else wh_N2.prod(1) * 3)
    budget, pinned_budget = (each // CHUNK_BYTES for each in room)
    residence, _ = settle(chunks_N, budget=budget, batch_items=batch_items, pinned_budget=pinned_budget)
    return MemoryPlan(
        size,
        subsampled,
        len(chunks_N),
        residence.num_resident,
        residence.num_pinned,
        residence.device_chunks * CHUNK_BYTES,
        residence.host_chunks * CHUNK_BYTES,
        int(chunks_N[residence.num_kept :].sum()) * CHUNK_BYTES,
    )
