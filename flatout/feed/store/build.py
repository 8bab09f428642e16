"""Decode everything once, in parallel, into a store: a feed reads the items, this process writes them down.

Items arrive in index order whatever the number of workers, so what a budget has room for is always the same subset.
"""

import logging
import pickle
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike

from flatout.errors import ConfigError
from flatout.feed.feed import Feed
from flatout.feed.knobs import FeedConfig
from flatout.feed.pickling import blame
from flatout.feed.plan import Plan
from flatout.feed.progress import Advance
from flatout.feed.source import DecodeError, Field, Rows, SampleSource
from flatout.feed.store.check import crc_of_file
from flatout.feed.store.file import ENTRY, UNREADABLE, describe
from flatout.feed.store.items import Items, decode_item
from flatout.feed.store.writer import StoreWriter
from flatout.feed.worker import cause_of

logger = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
MOST_PER_BATCH = 256
ITEMS_PROBED = 8


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
            array = decode_item(self._items, index)
            entry = describe(array, self._source_crc(self._items.path(index)))
        except (OSError, DecodeError) as error:
            entry = np.zeros((), ENTRY)
            entry["state"] = UNREADABLE
            array = np.frombuffer(cause_of(error).encode(), np.uint8)
        return {"entry": entry, "data": array.reshape(-1).view(np.uint8)[:, None]}

    def _source_crc(self, path: str) -> int:
        if self._last_input[0] != path:  # neighbours often come from one file
            self._last_input = path, crc_of_file(path)
        return self._last_input[1]


def build(items: Items, writer: StoreWriter, config: FeedConfig, advance: Advance) -> None:
    """Decode the items in index order until all are written or the writer is full; says what could not be decoded."""
    if config.num_workers and config.backend == "process":
        check_picklable(items)
    expected_bytes = _expected_bytes(items)
    source = Decoding(items, expected_bytes)
    batch_size = max(1, min(BATCH_BYTES // expected_bytes, len(items)))
    plan = Plan(num_samples=len(items), batch_size=batch_size, shuffle=False, last="short")
    unreadable: dict[int, str] = {}
    with Feed(source, plan, config) as feed:
        for batch in feed:
            ends = np.cumsum(batch.counts["data"]).tolist()
            pieces = np.split(batch["data"].reshape(-1), ends[:-1])
            for row, (index, data) in enumerate(zip(batch.positions.tolist(), pieces, strict=True)):
                entry = batch["entry"][row]
                if batch.indices[row] != index:  # it killed its workers
                    unreadable[index] = feed.bad_samples[index]
                elif entry["state"] == UNREADABLE:
                    unreadable[index] = data.tobytes().decode()
                elif not writer.add(index, entry, data):
                    _tell(items, unreadable)
                    return
                if index in unreadable:
                    writer.leave_out(index)
            advance(index + 1, writer.nbytes)
    _tell(items, unreadable)


def check_picklable(items: Items) -> None:
    """Refuse items that cannot be sent to worker processes, and say which part of them is to blame."""
    try:
        pickle.dumps(items)
    except Exception as error:  # whatever a class does when it is pickled
        raise ConfigError(
            f"{type(items).__name__} cannot be sent to worker processes: {blame(items)} cannot be pickled ({error}). "
            "Open such things on first use in `decode`, or use StoreConfig(backend='thread') or StoreConfig(workers=0)."
        ) from error


def _expected_bytes(items: Items) -> int:
    """What to make room for per item: a little more than the largest of a few, taken from all over the set."""
    largest = BATCH_BYTES // MOST_PER_BATCH
    for index in np.linspace(0, len(items) - 1, ITEMS_PROBED).astype(int).tolist():
        # Not swallowed: the feed decodes it again, and then the error comes with its item.
        with suppress(Exception):
            largest = max(largest, decode_item(items, index).nbytes * 5 // 4)
    return largest


def _tell(items: Items, unreadable: Mapping[int, str]) -> None:
    if unreadable:
        index, cause = next(iter(unreadable.items()))
        logger.warning(
            "%d of %d items could not be decoded and are not in the store; the first: %s (%s).",
            len(unreadable),
            len(items),
            items.where(index),
            cause,
        )
