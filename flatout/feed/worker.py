"""The worker's loop: claim a task, draw, read into the slot, hand over ragged rows, report.

The same code runs in a process, in a thread, or (one task at a time) in the caller's own thread.
Must not import torch: a worker would take seconds longer to start and hundreds of megabytes more memory.

Dimension key:  N items
"""

import contextlib
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from flatout.clock import TracedTotals, clock
from flatout.errors import DataError
from flatout.feed.batch import hand_over
from flatout.feed.ring import IDLE, UNKNOWN, UNREADABLE, Ring, Slot, Task
from flatout.feed.source import (
    UNREADABLE_ERRORS,
    Item,
    ItemSource,
    Out,
    RowsOut,
    Source,
    Unreadable,
    read_with_retries,
)

WORK, QUIT = b"\x01", b"\x00"

# A report must fit into one message, about 200 kB: a longer one would be rejected, not truncated.
CAUSE_CHARACTERS = 400
TRACEBACK_CHARACTERS = 40_000
REPLACEMENTS_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings that all workers of a feed share."""

    seed: int
    substitute_errors: bool
    """Unreadable items (OSError, DecodeError) are replaced instead of reported as failures."""


class Failure(NamedTuple):
    """An error to raise in the caller; `row` is the row in the batch, or -1 if no single sample caused it."""

    row: int
    sample: int
    cause: str
    traceback: str
    item: int = UNKNOWN
    """The item that could not be read, if it is known."""


class Report(NamedTuple):
    """Progress or outcome of a task: to be repeated if `overflow_bytes` is set, failed if `failure` is set."""

    ticket: int
    replaced: tuple[tuple[int, str], ...] = ()
    """Items that could not be read, and why."""
    overflow_bytes: int = 0
    failure: Failure | None = None


class TaskFailedError(Exception):
    """Carries a Failure out of the code that reads a task."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


def work(
    worker: int, ring: Ring, source: Source, settings: WorkerSettings, tokens: int, reports: socket.socket
) -> None:
    """Run tasks until a QUIT token arrives, or until the parent, and with it the token pipe, is gone."""
    if enter_worker := getattr(source, "enter_worker", None):
        enter_worker(worker, ring)
    runner = TaskRunner(worker, ring, source, settings, lambda report: reports.send(pickle.dumps(report)))
    with contextlib.suppress(ConnectionError):  # the owner is gone, and with it the reader of this report
        while os.read(tokens, 1) == WORK:
            runner.run_next_task()


class Selection(NamedTuple):
    """What to read for some rows of a batch: the samples of the plan, with known unreadable items replaced."""

    indices: np.ndarray
    draws: Mapping[str, np.ndarray]
    shown: np.ndarray
    """The samples that are shown; differs from `indices` only for an `ItemSource`, whose draws hold the substitutes."""
    num_replaced: np.ndarray
    """Number of substitutes per row."""
    bad_N: np.ndarray | None
    """Which items were excluded; None if none."""


class ReadRows(NamedTuple):
    """Some rows of a batch after reading."""

    out: Out
    selection: Selection


class TaskRunner:
    """Runs the tasks of one worker."""

    def __init__(
        self, worker: int, ring: Ring, source: Source, settings: WorkerSettings, send: Callable[[Report], object]
    ) -> None:
        self._worker = worker
        self._send = send
        self._ring = ring
        self._source = source
        self._items = source if isinstance(source, ItemSource) else None
        self._settings = settings
        self._totals = TracedTotals(ring.stages[worker], ring.timelines[worker : worker + 1])
        self._ticket = IDLE
        self._current_item = UNKNOWN  # the item being read, if the source reports it

    def run_next_task(self) -> None:
        """Claim a task and fill its rows; does nothing if there is no task.

        Only problems and complete slots are reported to the parent; a message for every task would wake it dozens of
        times per batch. Problems are sent before the task counts as done: when a slot is complete, all messages about
        it have been sent.
        """
        claimed = self._ring.claim(self._worker)
        if claimed is None:
            return
        self._ticket, task = claimed
        report = self._run(task)
        if report.overflow_bytes or report.failure:
            self._send(report)
        if not report.overflow_bytes and self._ring.finish(task):
            self._send(Report(self._ticket))
        self._ring.release(self._worker)

    def _run(self, task: Task) -> Report:
        with clock.recording(self._totals):
            try:
                return Report(self._ticket, overflow_bytes=self._fill(task))
            except TaskFailedError as failed:
                return Report(self._ticket, failure=failed.failure)
            except (Exception, SystemExit) as error:  # the source is the user's code; its errors go to the trainer
                return Report(self._ticket, failure=_describe(error, row=-1, sample=-1))

    def _fill(self, task: Task) -> int:
        """Read a task's rows and hand them over; returns the bytes needed if its ragged rows do not fit, else 0."""
        slot = self._ring.slots[task.slot]
        parts: list[ReadRows] = []
        if not task.singly:
            # Not swallowed: when the rows are read one by one, the error recurs with the sample that causes it.
            with contextlib.suppress(Exception, SystemExit):
                parts = [self._read_without_unreadable(slot, task.begin, task.end)]
        parts = parts or [self._read_one(slot, row) for row in range(task.begin, task.end)]
        rows = slice(task.begin, task.end)
        slot.shown[rows] = np.concatenate([part.selection.shown for part in parts])
        slot.replaced[rows] = np.concatenate([part.selection.num_replaced for part in parts])
        with clock.stage("hand over"):
            fields = self._ring.spec.rows_fields
            taken = {name: [rows for part in parts for rows in part.out[name].taken] for name in fields}
            return hand_over(self._ring, task, taken) if taken else 0

    def _read_one(self, slot: Slot, row: int) -> ReadRows:
        """Read one row. If its sample is an item and is unreadable, it is replaced; any other error is a failure."""
        while True:
            self._current_item = UNKNOWN
            try:
                return self._read_without_unreadable(slot, row, row + 1, alone=True)
            except (Exception, SystemExit) as error:  # the source is the user's code; its errors go to the trainer
                is_unreadable = isinstance(error, UNREADABLE_ERRORS) and self._current_item != UNKNOWN
                if self._items is None and is_unreadable and self._settings.substitute_errors:
                    self._exclude({self._current_item: cause_of(error)})
                    continue
                sample = (
                    self._current_item
                    if self._items is None and self._current_item != UNKNOWN
                    else int(slot.indices[row])
                )
                item = self._current_item if is_unreadable else UNKNOWN
                raise TaskFailedError(_describe(error, row=row, sample=sample, item=item)) from error

    def _read_without_unreadable(self, slot: Slot, begin: int, end: int, *, alone: bool = False) -> ReadRows:
        """Read rows; repeat without the items that turn out to be unreadable until there are none."""
        while True:
            selection = self._select(slot, begin, end)
            out, unreadable = self._read(slot, begin, end, selection, alone=alone)
            if not unreadable:
                return ReadRows(out, selection)
            if again := [item for item in unreadable if selection.bad_N is not None and selection.bad_N[item]]:
                raise DataError(
                    f"{type(self._source).__name__}.read() still fetches the unreadable item {again[0]}: substitute() "
                    "must replace every unreadable item that read() fetches"
                )
            self._exclude(unreadable)

    def _exclude(self, unreadable: Mapping[int, str]) -> None:
        """Make sure that no worker reads these items again. Reported before they are marked, so no report is lost."""
        for begin in range(0, len(unreadable), REPLACEMENTS_AT_ONCE):
            some = islice(unreadable.items(), begin, begin + REPLACEMENTS_AT_ONCE)
            self._send(Report(self._ticket, replaced=tuple(some)))
        for item in unreadable:
            self._ring.mark(item, UNREADABLE)

    def _select(self, slot: Slot, begin: int, end: int) -> Selection:
        epoch, positions, indices = int(slot.head["epoch"]), slot.positions[begin:end], slot.indices[begin:end].copy()
        none, bad_N = np.zeros(end - begin, bool), self._ring.bad_items()
        if bad_N is None:
            return Selection(indices, self._draw(epoch, positions, indices), indices, none, None)
        unreadable = Unreadable(bad_N, seed=self._settings.seed, epoch=epoch, positions_M=positions)
        if self._items is not None:
            draws = self._draw(epoch, positions, indices)
            shown, draws, num_replaced = self._items.substitute(indices, draws, unreadable)
            return Selection(indices, draws, shown, num_replaced, bad_N)
        is_bad = unreadable.among(indices)
        if is_bad.any():
            bad = np.flatnonzero(is_bad)
            indices[bad] = unreadable.substitutes(bad, indices[bad], bad_N)
        return Selection(indices, self._draw(epoch, positions, indices), indices, is_bad, bad_N)

    def _draw(self, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        with clock.stage("draw"):
            draws = self._source.draw(self._settings.seed, epoch, positions, indices)
        if draws is None:
            raise DataError(f"{type(self._source).__name__}.draw() returned None: return a dict of arrays, or {{}}.")
        return draws

    def _read(
        self, slot: Slot, begin: int, end: int, selection: Selection, *, alone: bool
    ) -> tuple[Out, Mapping[int, str]]:
        """Call the source's `read` once; also returns the items that could not be read -> cause."""
        spec, indices = self._ring.spec, selection.indices
        unreadable: dict[int, str] = {}
        # If samples are items, the one that is being read is recorded.
        reading = None if self._items is not None else lambda sample: self._note(int(indices[sample]))

        def read() -> Out:
            parts: dict[str, np.ndarray | RowsOut] = {name: slot.field(name)[begin:end] for name in spec.fixed_fields}
            parts |= {name: RowsOut(name, rows, end - begin) for name, rows in spec.rows_fields.items()}
            out = Out(parts, reading, first_row=begin, fetch=partial(self._fetch, unreadable))
            self._source.read(indices, selection.draws, out)
            return out

        # Items are recorded and retried as they are fetched; a sample that is itself an item, when it is read alone.
        is_item = alone and self._items is None
        if is_item:
            self._note(int(indices[0]))
        with clock.stage("read"):
            out = read_with_retries(read) if is_item else read()
        if not unreadable:
            self._check_all_put(out, indices)
        return out, unreadable

    def _fetch(self, unreadable: dict[int, str], item: int, read: Callable[[], Item], /) -> Item | None:
        """The `Fetch` of one call of `read`; adds an item that cannot be read and is to be replaced to `unreadable`."""
        if item in unreadable:
            return None
        self._note(item)
        try:
            return read_with_retries(read)
        except UNREADABLE_ERRORS as error:
            if not self._settings.substitute_errors:
                raise
            unreadable[item] = cause_of(error)
            return None

    def _note(self, item: int) -> None:
        self._current_item = item
        self._ring.note_item(self._worker, item)

    def _check_all_put(self, out: Out, indices: np.ndarray) -> None:
        for name in self._ring.spec.rows_fields:
            for sample, rows in enumerate(out[name].taken):
                if rows is None:
                    raise DataError(
                        f"read() put no rows into field '{name}' for sample {indices[sample]}, number {sample} of this "
                        f"call: call out['{name}'].put({sample}, rows), with an empty array if it has none"
                    )


def _describe(error: BaseException, *, row: int, sample: int, item: int = UNKNOWN) -> Failure:
    return Failure(row, sample, cause_of(error), traceback_of(error), item)


def cause_of(error: BaseException) -> str:
    """Type and text of an exception, shortened to fit into a message."""
    return _shortened(f"{type(error).__name__}: {error}", CAUSE_CHARACTERS)


def traceback_of(error: BaseException) -> str:
    """Traceback of an exception, shortened to fit into a message."""
    return _shortened("".join(traceback.format_exception(error)), TRACEBACK_CHARACTERS)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"
