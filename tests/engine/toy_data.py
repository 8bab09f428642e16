"""What the toy training sees. Imported by feed workers, so without torch."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from flatout.feed import Field, SampleSource

NUM_KINDS = 4


class Noise(SampleSource):
    """Four kinds of noise: one of three channels is brighter, or none is."""

    fields = {"image": Field((3, 8, 8)), "label": Field((), np.int64)}

    def __init__(self, count: int, *, unkeyed: bool = False) -> None:
        """`unkeyed`: every process draws numbers of its own, as careless sources do."""
        self.count = count
        self.unkeyed = unkeyed

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, Any]:
        kind = index % NUM_KINDS
        rng = np.random.default_rng(os.getpid()) if self.unkeyed else rng
        image = rng.integers(0, 128, (3, 8, 8)) + 40 * np.equal(kind, np.arange(3))[:, None, None]
        return {"image": image.astype(np.uint8), "label": kind}
