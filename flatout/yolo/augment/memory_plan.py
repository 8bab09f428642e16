"""Where the pictures of a data set will lie, from their sizes alone: before one of them is decoded.

Dimension key:  N pictures
"""

from typing import NamedTuple

import numpy as np

from flatout.feed.device_store import CHUNK_BYTES, chunks_of, settle
from flatout.yolo.augment.layout import resized_wh


class MemoryPlan(NamedTuple):
    """Where pictures will lie."""

    size: int
    num_pictures: int
    num_resident: int
    device_bytes: int
    pinned_bytes: int

    def __str__(self) -> str:
        each = (self.device_bytes + self.pinned_bytes) / self.num_pictures
        text = f"{self.num_pictures} pictures at {self.size} px, {each:,.0f} bytes each: "
        text += f"{self.num_resident} in device memory ({self.device_bytes / 1e9:.2f} GB)"
        away = self.num_pictures - self.num_resident
        return text + (f", {away} in pinned RAM ({self.pinned_bytes / 1e9:.2f} GB)" if away else "")


def plan_memory(size_wh_N2: np.ndarray, *, size: int, budget_bytes: int, batch_items: int) -> MemoryPlan:
    """What `picture_store` will do with pictures of these sizes."""
    chunks_N = chunks_of(resized_wh(size_wh_N2, size).prod(1) * 3)
    residence, _ = settle(chunks_N, budget=budget_bytes // CHUNK_BYTES, batch_items=batch_items)
    return MemoryPlan(
        size,
        len(chunks_N),
        residence.num_resident,
        residence.device_chunks * CHUNK_BYTES,
        residence.host_chunks * CHUNK_BYTES,
    )
