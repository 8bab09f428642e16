"""Arrays into one flat buffer, on the host or a device, by several threads, with a progress bar."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from flatout.feed.arrays import Arrays
from flatout.feed.progress import progress

BLOCK_CHUNKS = 1 << 16


def upload(
    arrays: Arrays, numbers: range, begin_N: np.ndarray, chunks_N: np.ndarray, target: Tensor, name: str
) -> None:
    """Write arrays `numbers` to the rows (chunks) of `target` from begin_N on; blocks until they are there."""
    on_device = target.device.type == "cuda"
    with progress(name, len(numbers)) as advance, ThreadPoolExecutor(4) as pool:
        for group in _blocks(numbers, chunks_N):
            begin, end = int(begin_N[group[0]]), int(begin_N[group[-1]] + chunks_N[group[-1]])
            rows = target[begin:end]
            # The allocator hands a pinned block out again only when its copy has ended, so the
            # threads fill the next block while this one is on its way.
            block = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True) if on_device else rows
            starts = (begin_N[group.start : group.stop] - begin) * rows.shape[1] * rows.element_size()
            list(pool.map(_Placing(arrays, block), group, starts.tolist()))
            if on_device:
                rows.copy_(block, non_blocking=True)
            advance(
                group.stop - numbers.start, (end - int(begin_N[numbers.start])) * rows.shape[1] * rows.element_size()
            )
    if on_device:
        torch.cuda.current_stream(target.device).synchronize()


class _Placing:
    """Writes one array into a block, at a byte."""

    def __init__(self, arrays: Arrays, block: Tensor) -> None:
        self._arrays = arrays
        self._bytes = block.view(-1).view(torch.uint8).numpy()

    def __call__(self, index: int, start: int) -> None:
        array = np.ascontiguousarray(self._arrays[index])
        self._bytes[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)


def _blocks(numbers: range, chunks_N: np.ndarray) -> Iterator[range]:
    """Consecutive items of about BLOCK_CHUNKS together, at least one each."""
    begin, size = numbers.start, 0
    for index in numbers:
        if size and size + chunks_N[index] > BLOCK_CHUNKS:
            yield range(begin, index)
            begin, size = index, 0
        size += int(chunks_N[index])
    if begin < numbers.stop:
        yield range(begin, numbers.stop)
