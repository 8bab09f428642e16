"""Batches made by tests, in the form in which a feed hands them to the training loop."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from flatout.feed.device import DeviceBatch


class FixedBatches:
    """The same batches in every epoch."""

    device_wait_s = fill_wait_s = 0.0

    def __init__(self, batches: Sequence[DeviceBatch]) -> None:
        self._batches = batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DeviceBatch]:
        return iter(self._batches[start:])


def random_batch(step: int, *, batch_size: int, size: int, num_classes: int, device: str = "cpu") -> DeviceBatch:
    """Noise with coloured squares, and their boxes."""
    rng = np.random.default_rng(step)
    images = rng.integers(0, 60, (batch_size, 3, size, size), np.uint8)
    rows = []
    for image in range(batch_size):
        for _ in range(rng.integers(0, 4)):
            side, kind = rng.uniform(0.15, 0.5), rng.integers(num_classes)
            x, y = rng.uniform(side / 2, 1 - side / 2, 2)
            low, high = (np.array([x, y]) - side / 2) * size, (np.array([x, y]) + side / 2) * size
            images[image, kind % 3, int(low[1]) : int(high[1]), int(low[0]) : int(high[0])] = 220
            rows.append((image, kind, x, y, side, side))
    targets = np.array(rows, np.float32).reshape(-1, 6)
    counts = np.bincount(targets[:, 0].astype(np.int64), minlength=batch_size).astype(np.int32)
    indices = np.arange(step * batch_size, (step + 1) * batch_size)
    fields: dict[str, Tensor] = {
        "images": torch.from_numpy(images).to(device),
        "targets": torch.from_numpy(targets).to(device),
    }
    return DeviceBatch(0, step, batch_size, indices, indices, fields, {"targets": counts})
