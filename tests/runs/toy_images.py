"""The data of the toy job. Imported by the workers of a feed, so without torch."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from flatout.feed import Field, SampleSource

NUM_KINDS = 4


class NoisyImages(SampleSource):
    """Images of noise in which one of three channels is brighter, or none is."""

    fields = {"image": Field((3, 8, 8)), "label": Field((), np.int64)}

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, Any]:
        kind = index % NUM_KINDS
        image = rng.integers(0, 128, (3, 8, 8)) + 40 * np.equal(kind, np.arange(3))[:, None, None]
        return {"image": image.astype(np.uint8), "label": kind}


class UnkeyedImages(NoisyImages):
    """Images that depend on the process, as in careless sources; for a negative control."""

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, Any]:
        return super().sample(index, np.random.default_rng(os.getpid()))
