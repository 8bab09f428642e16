"""Comparison of batches bit for bit, and sources with all kinds of fields."""

import hashlib

import numpy as np

from flatout.feed import Batch, Field, Rows, SampleSource
from flatout.feed.plan import keyed_uniform


def digest(batch: Batch) -> str:
    """One hash over everything in a batch."""
    total = hashlib.sha256(f"{batch.epoch} {batch.step} {batch.num_valid}".encode())
    for array in (batch.indices, batch.positions, *batch.fields.values(), *batch.counts.values()):
        total.update(f"{array.shape} {array.dtype}".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def digests(batches) -> list[str]:
    return [digest(batch) for batch in batches]


class Mixed(SampleSource):
    """An image, a label and two ragged fields of different width and dtype, all random."""

    fields = {
        "image": Field((3, 8, 10)),
        "label": Field((), np.int64),
        "boxes": Rows(5, np.float32, expected=3),
        "marks": Rows(1, np.int16, expected=1),
    }

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def where(self, index: int) -> str:
        return f"images/{index:04}.png"

    def sample(self, index, rng):
        return {
            "image": rng.integers(0, 256, (3, 8, 10), dtype=np.uint8) ^ np.uint8(index % 256),
            "label": index,
            "boxes": rng.random((index % 4, 5), dtype=np.float32),
            "marks": rng.integers(0, 99, (int(rng.integers(0, 3)), 1)).astype(np.int16),
        }


class Vectorised:
    """A source that reads whole micro-batches, with images of the size that the step requires."""

    fields = {"image": Field((1, 16, 16), np.float32), "index": Field((), np.int32)}

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def where(self, index: int) -> str:
        return f"row {index}"

    def draw(self, seed, epoch, positions, indices):
        return {"level": keyed_uniform(seed, epoch, positions, 3)}

    def read(self, indices, draws, out):
        _, _, height, width = out["image"].shape
        pattern = np.arange(height * width, dtype=np.float32).reshape(1, 1, height, width)
        out["image"][:] = draws["level"][:, :1, None, None] + indices[:, None, None, None] * pattern
        out["index"][:] = indices
