"""Items that a device store cannot keep, brought along by the batches that need them.

Workers read them from wherever they lie (a store in shared memory, its file, the page cache) while earlier batches
train; they reach the device with the batch, and are staged there like those of pinned memory.

Dimension key:  M samples   K items that are brought   C chunks
"""

from functools import partial

import numpy as np

from flatout.feed.batch import Arrays
from flatout.feed.source import Fields, Out, Rows

NUMBERS, CHUNKS = "brought", "brought_chunks"
"""Fields of a source: item numbers, and their bytes in chunks."""


class StreamedItems:
    """For a source: writes the items numbered `first` or above that its samples need."""

    def __init__(self, items: Arrays, chunks_N: np.ndarray, *, first: int, chunk_bytes: int) -> None:
        self._items = items
        self._chunks_N = chunks_N
        self._first = first
        self._chunk_bytes = chunk_bytes

    def fields(self, items_per_sample: float) -> Fields:
        """What a source promises in addition; of a sample's items a share is brought."""
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
        """Items `number_K` are needed by samples `sample_K`, in any order and more than once.

        Item `placeholder` is there in any case; blank if no sample needs it.
        """
        needed = set(number_K.tolist())
        if placeholder is not None:
            number_K, sample_K = np.append(number_K, placeholder), np.append(sample_K, 0)
        number_K, place_K = np.unique(number_K, return_index=True)
        away = number_K >= self._first
        # With the sample that needs an item first; the others find it in the batch as well.
        sample_K, number_K = sample_K[place_K][away], number_K[away]
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
