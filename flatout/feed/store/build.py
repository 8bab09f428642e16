"""Decode everything once, in parallel, into a store: a feed reads the items, this process writes them down.

Items arrive in index order whatever the number of workers, so what a budget has room for is always the same subset.
"""

import logging
import pickle
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike

from flatout.errors import ConfigError
from flatout.feed.config import FeedConfig
from flatout.feed.feed import Feed
from flatout.feed.plan import Plan
from flatout.feed.processes import blame
from flatout.feed.source import DecodeError, Field, Rows, SampleSource
from flatout.feed.store.file import ENTRY, UNREADABLE, StoreFile, StoreWriter, describe
from flatout.feed.store.items import Items, decode_item
from flatout.feed.worker import cause_of
from flatout.progress import Advance

logger = logging.getLogger(__name__)

# Is a store still what its input files say? Reads every byte of both, which is why it is done on demand only.


def first_difference(file: StoreFile, items: Items, *, num_threads: int) -> str:
    """One sentence about the first item that is damaged or whose input has another content; "" if there is none."""

    def look_at(index: int) -> str:
        if not file.holds(index):
            return ""
        if not file.is_intact(index):
            return f"the stored bytes of {items.where(index)} are damaged"
        is_same = crc_of_file(items.path(index)) == int(file.index["source_crc"][index])
        return "" if is_same else f"{items.where(index)} is gone or has another content than when it was decoded"

    # Threads: zlib computes without the GIL.
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        return next(filter(None, pool.map(look_at, range(len(file)))), "")


def crc_of_file(path: str) -> int:
    """CRC-32 of a file's bytes; 0 for what is no file, such as a member of an archive."""
    crc = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
    except OSError:
        return 0
    return crc


Decoded = tuple[np.ndarray, np.ndarray]
"""The index entry of an item, and its bytes: ENTRY [], uint8 [nbytes]."""

BATCH_BYTES = 16 << 20
MOST_PER_BATCH = 256
ITEMS_PROBED = 8
TOLD_EVERY = 8
"""Items between two words about progress."""


class Decoding(SampleSource):
    """Each item as bytes with its index entry; of one that cannot be decoded, the reason as text."""

    def __init__(self, items: Items, expected_bytes: int) -> None:
        self.fields = {"entry": Field((), ENTRY), "data": Rows(1, np.uint8, expected=expected_bytes)}
        self._items = items
        self._last_input = "", 0

    def __len__(self) -> int:
        return len(self._items)

    def where(self, index: int) -> str:
        return self._items.where(index)

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        try:
            entry, array = self.decoded(index)
        except (OSError, DecodeError) as error:
            entry = np.zeros((), ENTRY)
            entry["state"] = UNREADABLE
            array = np.frombuffer(cause_of(error).encode(), np.uint8)
        return {"entry": entry, "data": array[:, None]}

    def decoded(self, index: int) -> Decoded:
        """An item that can be decoded."""
        array = decode_item(self._items, index)
        entry = describe(array, self._source_crc(self._items.path(index)))
        return entry, array.reshape(-1).view(np.uint8)

    def _source_crc(self, path: str) -> int:
        if self._last_input[0] != path:  # neighbours often come from one file
            self._last_input = path, crc_of_file(path)
        return self._last_input[1]


def build(items: Items, writer: StoreWriter, config: FeedConfig, advance: Advance) -> None:
    """Decode the items in index order until all are written or the writer is full; says what could not be decoded.

    Every item is decoded once: those that were looked at to learn their size are written as they are.
    """
    if config.num_workers and config.backend == "process":
        check_picklable(items)
    known = _probed(items)
    unreadable: dict[int, str] = {}
    for number, (index, outcome) in enumerate(_in_order(items, known, config)):
        if isinstance(outcome, str):
            unreadable[index] = outcome
            writer.leave_out(index)
        elif not writer.add(index, *outcome):
            break
        if number % TOLD_EVERY == 0 or index == len(items) - 1:
            advance(index + 1, writer.nbytes)
    _tell(items, unreadable)


def _in_order(items: Items, known: dict[int, Decoded], config: FeedConfig) -> Iterator[tuple[int, Decoded | str]]:
    """Every item, decoded, or why it cannot be."""
    rest = np.array([index for index in range(len(items)) if index not in known], np.int64)
    expected_bytes = max([BATCH_BYTES // MOST_PER_BATCH, *(len(data) * 5 // 4 for _, data in known.values())])
    given = 0
    for index, outcome in _decoded(items, rest, expected_bytes, config):
        while given < index:
            yield given, known.pop(given)
            given += 1
        yield index, outcome
        given = index + 1
    for index in range(given, len(items)):
        yield index, known.pop(index)


def _decoded(
    items: Items, indices: np.ndarray, expected_bytes: int, config: FeedConfig
) -> Iterator[tuple[int, Decoded | str]]:
    """Some items by a feed's workers; what is given is overwritten afterwards."""
    if not len(indices):
        return
    batch_size = max(1, min(BATCH_BYTES // expected_bytes, len(indices)))
    plan = Plan(num_samples=len(items), batch_size=batch_size, shuffle=False, last="short", order=indices)
    with Feed(Decoding(items, expected_bytes), plan, config) as feed:
        for batch in feed:
            ends = np.cumsum(batch.counts["data"]).tolist()
            pieces = np.split(batch["data"].reshape(-1), ends[:-1])
            for row, data in enumerate(pieces):
                index, entry = int(indices[batch.positions[row]]), batch["entry"][row]
                if batch.indices[row] != index:  # it killed its workers
                    yield index, feed.bad_samples[index]
                elif entry["state"] == UNREADABLE:
                    yield index, data.tobytes().decode()
                else:
                    yield index, (entry, data)


def check_picklable(items: Items) -> None:
    """Refuse items that cannot be sent to worker processes, and say which part of them is to blame."""
    try:
        pickle.dumps(items)
    except Exception as error:  # whatever a class does when it is pickled
        raise ConfigError(
            f"{type(items).__name__} cannot be sent to worker processes: {blame(items)} cannot be pickled ({error}). "
            "Open such things on first use in `decode`, or use StoreConfig(backend='thread') or StoreConfig(workers=0)."
        ) from error


def _probed(items: Items) -> dict[int, Decoded]:
    """A few items from all over the set: they tell how much room one takes."""
    source, found = Decoding(items, 1), {}
    for index in np.unique(np.linspace(0, len(items) - 1, ITEMS_PROBED).astype(int)).tolist():
        # Not swallowed: the feed decodes it again, and then the error comes with its item.
        with suppress(Exception):
            entry, data = source.decoded(index)
            found[index] = entry, data
    return found


def _tell(items: Items, unreadable: Mapping[int, str]) -> None:
    if unreadable:
        index, cause = next(iter(unreadable.items()))
        logger.warning(
            "%d of %d items could not be decoded and will be missing from the store; the first: %s (%s).",
            len(unreadable),
            len(items),
            items.where(index),
            cause,
        )
