"""Items read in the background, in the order in which a training needs them: it begins before all of them are read.

    steps of the plan --> items in order of first use --> worker: read, decode --> slot --put--> device store
    step k: waits until the items before a certain place in this order are in the store

Which batches a training sees does not depend on any of this. An item that cannot be read is the one thing that is known
later than if all were read first: then no step goes past it before everything is read, and what was drawn without this
knowledge is drawn again.

Must not import torch: workers import this module.

Dimension key:  N items   M items of a batch   K of them that could be read   W largest size of an item in bytes
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from flatout.errors import ConfigError
from flatout.feed.batch import Batch, ShapedArrays
from flatout.feed.config import FeedConfig
from flatout.feed.feed import Feed
from flatout.feed.plan import Plan
from flatout.feed.runtime import FeedRuntime
from flatout.feed.source import UNREADABLE_ERRORS, Field, Fields, Out, Rows, read_with_retries
from flatout.feed.worker import cause_of
from flatout.progress import progress

logger = logging.getLogger(__name__)

BATCH_BYTES, MAX_PER_BATCH = 16 << 20, 256
"""Size of the batches in which items are read."""
PER_TASK = 4
"""Items in one task of a worker."""
SEGMENT_ITEMS = 256
"""Fewest items whose order is decided at a time, except the last."""
FEW_NEW = 0.01
"""Share of a step's items that are new, below which the order of the rest makes no difference any more."""
CLOSE_S = 10.0
"""How long `close` waits for the thread; a disk that hangs may keep it busy."""

Put = Callable[[np.ndarray, np.ndarray], None]
"""(item numbers int64 [K], uint8 [K, W]: each item at the beginning of its row) -> all of them are in the store when it
returns."""


class ItemBytes:
    """A source of items as bytes at the beginning of a row; for one that cannot be read, the cause."""

    def __init__(self, items: ShapedArrays, names: Sequence[str]) -> None:
        """`names`: of the items' files, for messages."""
        self._items, self._names = items, names
        self.item_bytes_N = items.shapes_ND.prod(1) * items.dtype.itemsize
        self.fields: Fields = {
            "data": Field((int(self.item_bytes_N.max()),)),
            "cause": Rows(1, np.uint8, expected=1),
        }

    def __len__(self) -> int:
        return len(self._items)

    def where(self, index: int) -> str:
        return self._names[index]

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for row, index in enumerate(indices.tolist()):
            out.reading(row)
            cause = b""
            try:
                read = read_with_retries(partial(self._items.__getitem__, index))
                item = np.ascontiguousarray(read).reshape(-1).view(np.uint8)
                out["data"][row, : len(item)] = item
            except UNREADABLE_ERRORS as error:
                cause = cause_of(error).encode()
            out["cause"].put(row, np.frombuffer(cause, np.uint8)[:, None])


class BackgroundFill:
    """A thread that has all items read by workers of its own, those that are needed first before all others.

    `close()` ends it at any time, and may be called twice.
    """

    def __init__(
        self,
        items: ShapedArrays,
        names: Sequence[str],
        put: Put,
        uses: Iterator[np.ndarray],
        *,
        begin: tuple[int, int] = (0, 0),
        workers: int | str = "auto",
        before_reading: Callable[[FeedRuntime], None] | None = None,
    ) -> None:
        """`uses`: the items that each step needs, from the step `begin` (epoch, step) to the end of that epoch; repeats
        allowed. `before_reading` is called in the thread, with the runtime of its feed, once the workers run."""
        self._source = ItemBytes(items, names)
        self._put, self._uses, self._begin = put, uses, begin
        self._config = FeedConfig(workers=workers, micro_batch=PER_TASK, bad_share=1.0)
        self._before_reading = before_reading
        # Written by the thread only:
        self._is_ordered_N = np.zeros(len(items), bool)
        self._segments: list[np.ndarray] = []
        self._order_error: Exception | None = None
        # Shared, under the condition's lock:
        self._changed = threading.Condition()
        self._needed: list[int] = []
        """For each step, how many items of the order must be in the store before it."""
        self._num_done = 0
        self._first_unreadable: int | None = None
        """Place in the order of the first item that could not be read."""
        self._error: BaseException | None = None
        self._is_complete = self._is_closing = False
        self._began_s = time.monotonic()
        self.unreadable: dict[int, str] = {}
        """Item -> cause; complete when all items are read."""
        self._thread = threading.Thread(target=self._run, name="flatout-fill", daemon=True)

    def __len__(self) -> int:
        return len(self._source)

    def start(self) -> None:
        self._began_s = time.monotonic()
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether all items are read."""
        with self._changed:
            return self._is_complete

    @property
    def num_left(self) -> int:
        """Items that are still to be read."""
        with self._changed:
            return len(self) - self._num_done

    @property
    def seconds_left(self) -> float:
        """Expected time until all items are read, at the mean speed so far; 0 before the first."""
        with self._changed:
            if not self._num_done:
                return 0.0
            return (time.monotonic() - self._began_s) / self._num_done * (len(self) - self._num_done)

    def is_ready(self, epoch: float, step: int) -> bool:
        """Whether a step can begin: all items that it needs are in the store, and none of them is unreadable."""
        with self._changed:
            return self._error is None and self._is_usable(self._number(epoch, step))

    def wait_for(self, epoch: float, step: int) -> bool:
        """Block until a step can begin; True if its batch can be used as it was drawn.

        False if there are unreadable items that it was drawn without knowing of. Then all items are read, `unreadable`
        has the unreadable ones, and this and all later steps must be drawn again. Raises the error that ended the
        reading.
        """
        number = self._number(epoch, step)
        with self._changed:
            while not (self._is_usable(number) or self._is_complete):
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return self._is_usable(number)

    def close(self) -> None:
        """End the thread and its workers, and wait for both."""
        with self._changed:
            self._is_closing = True
            if self._error is None and not self._is_complete:
                self._error = ConfigError("The input was closed while its items were still being read. Open it again.")
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _number(self, epoch: float, step: int) -> int | None:
        """How many steps after the first one this is; None if its items are not known by themselves."""
        first_epoch, first_step = self._begin
        return step - first_step if epoch == first_epoch and step >= first_step else None

    def _is_usable(self, number: int | None) -> bool:
        if self._is_complete and not self.unreadable:
            return True
        if number is None or number >= len(self._needed):
            return False
        good = self._num_done if self._first_unreadable is None else self._first_unreadable
        return self._needed[number] <= good

    # The thread

    def _run(self) -> None:
        try:
            self._read_all()
        except BaseException as error:  # raised in the trainer, which waits for it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _read_all(self) -> None:
        largest = self._source.fields["data"].shape[0]  # type: ignore[union-attr]
        plan = Plan(
            num_samples=len(self),
            batch_size=max(1, min(MAX_PER_BATCH, BATCH_BYTES // max(1, largest), len(self))),
            shuffle=False,
            last="short",
            order=self._segment,
        )
        with Feed(self._source, plan, self._config) as feed, progress("decoding", len(self), bar=False) as advance:
            if self._before_reading is not None:
                self._before_reading(feed.open(0).runtime)
            nbytes = 0
            number = 0
            # The feed makes segments ahead, as epochs of its plan.
            while number < len(self._segments) or not self._is_ordered_N.all():
                for batch in feed.epoch(number):
                    nbytes += self._take(batch, self._segments[number][batch.positions], feed)
                    if self._is_closing:
                        return
                    advance(self._num_done, nbytes)
                number += 1
            seconds = time.monotonic() - self._began_s
            speed = len(self) / max(seconds, 1e-9)
            logger.info("All %d images are decoded, in %.1f s (%.0f images/s).", len(self), seconds, speed)
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def _take(self, batch: Batch, item_M: np.ndarray, feed: Feed) -> int:
        """Put a batch of items into the store; returns their bytes."""
        # An item that killed its workers was replaced by another.
        is_lost_M = batch.indices != item_M
        is_good_M = (batch.counts["cause"] == 0) & ~is_lost_M
        data_MW = batch["data"]
        self._put(item_M[is_good_M], data_MW if is_good_M.all() else data_MW[is_good_M])
        ends_M = np.cumsum(batch.counts["cause"])
        bad = {}
        for row in np.flatnonzero(~is_good_M).tolist():
            item = int(item_M[row])
            text = batch["cause"][ends_M[row] - batch.counts["cause"][row] : ends_M[row], 0].tobytes().decode()
            bad[item] = feed.bad_samples[item] if is_lost_M[row] else text
        with self._changed:
            if bad and self._first_unreadable is None:
                self._first_unreadable = self._num_done + int(np.argmin(is_good_M))
            self.unreadable |= bad
            self._num_done += len(batch)
            self._changed.notify_all()
        return int(self._source.item_bytes_N[item_M[is_good_M]].sum())

    # The order: segments of items that no segment before has, as many steps in each as have SEGMENT_ITEMS new items.
    # When steps have hardly any new items, a last segment has all the others, for which later steps wait together.

    def _segment(self, number: int) -> np.ndarray:
        """The items of a segment, for the plan; LookupError after the last."""
        while len(self._segments) <= number:
            if self._order_error is not None:
                raise self._order_error
            try:
                self._segments.append(self._next_segment())
            except Exception as error:
                self._order_error = error  # the plan may ask again, and must not go on behind the gap
        return self._segments[number]

    def _next_segment(self) -> np.ndarray:
        parts: list[np.ndarray] = []
        num_before, num_new = int(self._is_ordered_N.sum()), 0
        for used in self._uses:
            new = np.unique(used[~self._is_ordered_N[used]])
            self._is_ordered_N[new] = True
            parts.append(new)
            num_new += len(new)
            with self._changed:
                self._needed.append(num_before + num_new)
            if len(new) < FEW_NEW * len(used):
                break
            if num_new >= SEGMENT_ITEMS:
                return np.concatenate(parts)
        rest = np.flatnonzero(~self._is_ordered_N)
        self._is_ordered_N[rest] = True
        found = np.concatenate([*parts, rest]) if parts else rest
        if not len(found):
            raise LookupError("all items are in earlier segments")
        return found
