"""Hear how many images every batch has: the last one of an epoch may be short, and its step is like no other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flatout.feed.device import DeviceBatch, DeviceBatches


@contextmanager
def heard_batches(hear: Callable[[int], None]) -> Iterator[None]:
    """Tell `hear` the images of every batch that a training inside the block takes, wherever they come from."""
    real_epoch = DeviceBatches.epoch

    def epoch(self: DeviceBatches, epoch: int, start: int = 0) -> Any:
        return _told(real_epoch(self, epoch, start), hear)

    DeviceBatches.epoch = epoch  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceBatches.epoch = real_epoch  # type: ignore[method-assign]


def _told(batches: Iterator[DeviceBatch], hear: Callable[[int], None]) -> Iterator[DeviceBatch]:
    for batch in batches:
        hear(len(batch))
        yield batch
