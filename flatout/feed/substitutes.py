"""What is shown instead of what cannot be read.

The unit is the *item*: the picture of a mosaic, the strip a patch is cut from, the file of a clip; for most sources,
the sample itself. What stands in for an item follows from its place in the stream and from which items are unreadable,
and from nothing else. An item that is not yet known to be unreadable is found out when it is read, and then the choice
is made again: so it makes no difference who knew what, and any number of workers delivers the same batches.

Dimension key:  N items   M samples   K substitutions   J candidates for one substitution
"""

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from flatout.errors import DataError
from flatout.feed.philox import Purpose, keyed_uniform
from flatout.feed.source import DecodeError

READ_ATTEMPTS = 4
CANDIDATES = 100

Item = TypeVar("Item")


UNREADABLE_ERRORS = (OSError, DecodeError)
"""What a file can do to its reader; anything else is a bug."""


class NothingReadableError(DataError):
    """There is nothing left that could be shown instead."""


class Unreadable:
    """The items known to be unreadable while M samples are chosen, and what stands in for them."""

    def __init__(self, is_bad_N: np.ndarray, *, seed: int, epoch: int, positions_M: np.ndarray) -> None:
        self.is_bad_N = is_bad_N
        self.seed, self.epoch, self.positions_M = seed, epoch, np.asarray(positions_M)

    def among(self, items: np.ndarray) -> np.ndarray:
        """Which of these item numbers are unreadable, bool of the same shape; numbers below 0 are no items."""
        items = np.asarray(items)
        return np.asarray((items >= 0) & self.is_bad_N[items])

    def stand_ins(self, sample_K: np.ndarray, number_K: np.ndarray, is_bad_N: np.ndarray) -> np.ndarray:
        """What samples `sample_K` show instead of `number_K`, int64 [K]: numbers that are not bad.

        `is_bad_N` says which of N things of a kind cannot be shown: all items, some of them, or what is made of them.
        """
        num = len(is_bad_N)
        if not len(number_K):
            return np.zeros(0, np.int64)
        if is_bad_N.all():
            raise NothingReadableError(f"none of {num} files can be read. Check the data set")
        rows, row_K = np.unique(sample_K, return_inverse=True)
        uniform_RJ = keyed_uniform(
            self.seed, self.epoch, self.positions_M[rows], CANDIDATES, purpose=Purpose.SUBSTITUTE
        )
        # Counted from the number itself: two items of a sample get different ones, and none gets itself.
        number_K = np.asarray(number_K, np.int64)
        candidate_KJ = (number_K[:, None] + 1 + (uniform_RJ[row_K] * (num - 1)).astype(np.int64)) % num
        is_good_KJ = ~is_bad_N[candidate_KJ]
        chosen_K = candidate_KJ[np.arange(len(number_K)), is_good_KJ.argmax(1)]
        for k in np.flatnonzero(~is_good_KJ.any(1)).tolist():
            # Hardly anything is readable: the next that is.
            chosen_K[k] = (number_K[k] + np.roll(is_bad_N, -int(number_K[k])).argmin()) % num
        return np.asarray(chosen_K)


def read_patiently(read: Callable[[], Item]) -> Item:
    """What `read` returns; tried again where a disk may have failed for a moment (EIO, ESTALE on network disks)."""
    for attempt in range(1, READ_ATTEMPTS):
        try:
            return read()
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            time.sleep(0.05 * 2**attempt)  # 0.7 s in all
    return read()
