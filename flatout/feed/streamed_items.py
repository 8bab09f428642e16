"""Streamed items: those that a device store cannot keep, sent along with the batches that need them.

Workers read them from wherever they are kept (a store in shared memory, its file, the page cache) while the GPU works
on earlier batches. They reach the device with the batch, and are staged there like items in pinned memory.

Dimension key:  N items   M samples   K streamed items
"""

from functools import partial

import numpy as np

from flatout.feed.batch import Arrays
from flatout.feed.source import Fields, Out, Rows

NUMBERS, CHUNKS = "streamed", "streamed_chunks"
"""Names of the source's fields for item numbers, and for their bytes in chunks."""


class StreamedItems:
    """Used by a source to write the items, numbered `first` or above, that its samples need."""

    def __init__(self, items: Arrays, chunks_N: np.ndarray, *, first: int, chunk_bytes: int) -> None:
        self._items = items
        self._chunks_N = chunks_N
        self._first = first
        self._chunk_bytes = chunk_bytes

    def fields(self, items_per_sample: float) -> Fields:
        """The additional fields of the source, sized for the share of `items_per_sample` that is streamed."""
        share = 1 - self._first / len(self._chunks_N)
        expected = items_per_sample * share
        return {
            NUMBERS: Rows(1, np.int64, expected=1 + expected),
            CHUNKS: Rows(self._chunk_bytes, np.uint8, expected=expected * float(self._chunks_N.mean())),
        }

    def write(
        self,
        number_K: np.ndarray,
        sample_K: np.ndarray,
        num_samples: int,
        out: Out,
        *,
        placeholder: int | None = None,
    ) -> None:
        """Write the streamed ones among items `number_K`, needed by samples `sample_K`, in any order, repeats included.

        Item `placeholder` is always included; it is blank if no sample needs it.
        """
        needed = set(number_K.tolist())
        if placeholder is not None:
            number_K, sample_K = np.append(number_K, placeholder), np.append(sample_K, 0)
        number_K, place_K = np.unique(number_K, return_index=True)
        is_streamed = number_K >= self._first
        # An item is written once, with the first sample that needs it; other samples find it in the same batch.
        sample_K, number_K = sample_K[place_K][is_streamed], number_K[is_streamed]
        order = np.argsort(sample_K, kind="stable")
        sample_K, number_K = sample_K[order], number_K[order]
        chunks_K = self._chunks_N[number_K]
        memory = np.zeros(int(chunks_K.sum()) * self._chunk_bytes, np.uint8)
        begins_K = (np.cumsum(chunks_K) - chunks_K) * self._chunk_bytes
        for number, begin in zip(number_K.tolist(), begins_K.tolist(), strict=True):
            item = out.fetch(number, partial(self._items.__getitem__, number)) if number in needed else None
            if item is not None:
                data = np.ascontiguousarray(item).reshape(-1).view(np.uint8)
                memory[begin : begin + len(data)] = data
        out[NUMBERS].put_all(number_K[:, None], np.bincount(sample_K, minlength=num_samples))
        chunks_M = np.bincount(sample_K, weights=chunks_K, minlength=num_samples).astype(np.int64)
        out[CHUNKS].put_all(memory.reshape(-1, self._chunk_bytes), chunks_M)
