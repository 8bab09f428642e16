"""What a worker does with a task: draw, read into the slot, hand over its ragged rows, report.

The same loop runs in a process, in a thread, or (one task at a time) in the caller's own thread.
Imports no torch: a worker that did would take seconds longer to start and hundreds of megabytes more.
"""

import contextlib
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    ReadingNote,
    RowsOut,
    Source,
    Unreadable,
    read_patiently,
)

WORK, QUIT = b"\x01", b"\x00"

# A report must fit into one message, about 200 kB: more would not be cut off but refused.
CAUSE_CHARACTERS = 400
TRACEBACK_CHARACTERS = 40_000
REPLACEMENTS_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class WorkOrders:
    """What every worker of a feed is told once."""

    seed: int
    substitute_errors: bool
    """Unreadable items (OSError, DecodeError) are replaced instead of reported as failures."""


class Replacement(NamedTuple):
    """An item that could not be read, and why."""

    item: int
    cause: str


class Failure(NamedTuple):
    """An error that must reach the caller; row is the batch row, or -1 if no single sample is to blame."""

    row: int
    sample: int
    cause: str
    traceback: str
    item: int = UNKNOWN
    """What could not be read, where that is known and is not the sample itself."""


class Report(NamedTuple):
    """How a task goes or has ended: to be done again if `overflow_bytes` is set, a failure if `failure` is."""

    ticket: int
    worker: int
    replaced: tuple[Replacement, ...] = ()
    overflow_bytes: int = 0
    failure: Failure | None = None

    @property
    def is_trouble(self) -> bool:
        return bool(self.replaced or self.overflow_bytes or self.failure)


class WorkFailedError(Exception):
    """Carries a Failure out of the reading of a task."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


def work(worker: int, ring: Ring, source: Source, orders: WorkOrders, tokens: int, reports: socket.socket) -> None:
    """Do tasks until told to quit, or until the parent and with it the token pipe is gone."""
    if enter_worker := getattr(source, "enter_worker", None):
        enter_worker(worker, ring)
    bench = Bench(worker, ring, source, orders, lambda report: reports.send(pickle.dumps(report)))
    with contextlib.suppress(ConnectionError):  # the owner is gone; nobody waits for this report
        while os.read(tokens, 1) == WORK:
            bench.do_next_task()


class Chosen(NamedTuple):
    """What is read for some rows of a batch: the samples of the plan, less what is known to be unreadable."""

    indices: np.ndarray
    draws: Mapping[str, np.ndarray]
    shown: np.ndarray
    """Which samples these are; differs from `indices` only where draws say what is shown instead."""
    num_replaced: np.ndarray
    """Per row."""
    bad_N: np.ndarray | None
    """The items that were left out."""


class Piece(NamedTuple):
    """Rows of a batch that have been read."""

    out: Out
    chosen: Chosen


class Fetching:
    """Gets the items of one reading; collects those that cannot be read, if they are to be replaced."""

    def __init__(self, note: Callable[[int], None], *, substitute: bool) -> None:
        self._note = note
        self._substitute = substitute
        self.unreadable: dict[int, str] = {}
        """Item -> cause."""

    def __call__(self, item: int, read: Callable[[], Item], /) -> Item | None:
        if item in self.unreadable:
            return None
        self._note(item)
        try:
            return read_patiently(read)
        except UNREADABLE_ERRORS as error:
            if not self._substitute:
                raise
            self.unreadable[item] = cause_of(error)
            return None


class Bench:
    """One worker's place: its ring, its source, and the task on it."""

    def __init__(
        self, worker: int, ring: Ring, source: Source, orders: WorkOrders, send: Callable[[Report], object]
    ) -> None:
        self._worker = worker
        self._send = send
        self._ring = ring
        self._source = source
        self._items = source if isinstance(source, ItemSource) else None
        self._orders = orders
        self._totals = TracedTotals(ring.stages[worker], ring.timelines[worker : worker + 1])
        self._ticket = IDLE
        self._at = UNKNOWN  # the item that is being read, where that is noted

    def do_next_task(self) -> None:
        """Claim a task and fill its rows, unless nothing is left to claim.

        The parent is told of trouble, and of a slot that is complete; a message for every task would
        wake it dozens of times per batch. Trouble is told before the task counts as done, so whoever sees
        a complete slot finds everything there is to know about it among the messages sent.
        """
        claimed = self._ring.claim(self._worker)
        if claimed is None:
            return
        self._ticket, task = claimed
        report = self._report_on(task)
        if report.is_trouble:
            self._send(report)
        if not report.overflow_bytes and self._ring.finish(task):
            self._send(Report(self._ticket, self._worker))
        self._ring.put_down(self._worker)

    def _report_on(self, task: Task) -> Report:
        with clock.recording(self._totals):
            try:
                return Report(self._ticket, self._worker, overflow_bytes=self._fill(task))
            except WorkFailedError as failed:
                return Report(self._ticket, self._worker, failure=failed.failure)
            except (Exception, SystemExit) as error:
                return Report(self._ticket, self._worker, failure=_describe(error, row=-1, sample=-1))

    def _fill(self, task: Task) -> int:
        """Read a task's rows and hand them over; the bytes needed if their ragged rows do not fit, else 0."""
        slot = self._ring.slots[task.slot]
        pieces = None if task.singly else self._try_whole(slot, task)
        if pieces is None:
            pieces = [self._read_one(slot, row) for row in range(task.begin, task.end)]
        rows = slice(task.begin, task.end)
        slot.shown[rows] = np.concatenate([piece.chosen.shown for piece in pieces])
        slot.replaced[rows] = np.concatenate([piece.chosen.num_replaced for piece in pieces])
        with clock.stage("hand over"):
            fields = self._ring.spec.rows_fields
            taken = {name: [rows for piece in pieces for rows in piece.out[name].taken] for name in fields}
            return hand_over(self._ring, task, taken) if taken else 0

    def _try_whole(self, slot: Slot, task: Task) -> list[Piece] | None:
        """Read all rows in one call; None if that raised, so that they are tried one by one."""
        try:
            return [self._read_without_unreadable(slot, task.begin, task.end)]
        except (Exception, SystemExit):
            # Not swallowed: read again one by one, the error comes back with the sample that caused it.
            return None

    def _read_one(self, slot: Slot, row: int) -> Piece:
        """Read one row. If it raises, it is replaced where a sample is an item; else nothing can be replaced."""
        while True:
            self._at = UNKNOWN
            try:
                return self._read_without_unreadable(slot, row, row + 1, alone=True)
            except (Exception, SystemExit) as error:
                is_unreadable = isinstance(error, UNREADABLE_ERRORS) and self._at != UNKNOWN
                if self._items is None and is_unreadable and self._orders.substitute_errors:
                    self._give_up({self._at: cause_of(error)})
                    continue
                sample = self._at if self._items is None and self._at != UNKNOWN else int(slot.indices[row])
                item = self._at if is_unreadable else UNKNOWN
                raise WorkFailedError(_describe(error, row=row, sample=sample, item=item)) from error

    def _read_without_unreadable(self, slot: Slot, begin: int, end: int, *, alone: bool = False) -> Piece:
        """Read rows, again and again without the items that turn out to be unreadable, until there is none."""
        while True:
            chosen = self._choose(slot, begin, end)
            out, unreadable = self._read(slot, begin, end, chosen, alone=alone)
            if not unreadable:
                return Piece(out, chosen)
            if again := [item for item in unreadable if chosen.bad_N is not None and chosen.bad_N[item]]:
                raise DataError(f"{type(self._source).__name__} reads item {again[0]} again, which it was to replace")
            self._give_up(unreadable)

    def _give_up(self, unreadable: Mapping[int, str]) -> None:
        """Have nobody read these items again. Reported first: one that is marked is never found out again."""
        told = [Replacement(item, cause) for item, cause in unreadable.items()]
        for begin in range(0, len(told), REPLACEMENTS_AT_ONCE):
            some = tuple(told[begin : begin + REPLACEMENTS_AT_ONCE])
            self._send(Report(self._ticket, self._worker, replaced=some))
        for item in unreadable:
            self._ring.mark(item, UNREADABLE)

    def _choose(self, slot: Slot, begin: int, end: int) -> Chosen:
        epoch, positions, indices = int(slot.head["epoch"]), slot.positions[begin:end], slot.indices[begin:end].copy()
        none, bad_N = np.zeros(end - begin, bool), self._ring.bad_items()
        if bad_N is None:
            return Chosen(indices, self._draw(epoch, positions, indices), indices, none, None)
        unreadable = Unreadable(bad_N, seed=self._orders.seed, epoch=epoch, positions_M=positions)
        if self._items is not None:
            draws = self._draw(epoch, positions, indices)
            shown, draws, num_replaced = self._items.substitute(indices, draws, unreadable)
            return Chosen(indices, draws, shown, num_replaced, bad_N)
        is_bad = unreadable.among(indices)
        if is_bad.any():
            bad = np.flatnonzero(is_bad)
            indices[bad] = unreadable.stand_ins(bad, indices[bad], bad_N)
        return Chosen(indices, self._draw(epoch, positions, indices), indices, is_bad, bad_N)

    def _draw(self, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        with clock.stage("draw"):
            draws = self._source.draw(self._orders.seed, epoch, positions, indices)
        if draws is None:
            raise DataError(f"{type(self._source).__name__}.draw() returned nothing: return a dict of arrays, or {{}}.")
        return draws

    def _read(self, slot: Slot, begin: int, end: int, chosen: Chosen, *, alone: bool) -> tuple[Out, Mapping[int, str]]:
        """One call of the source's `read`; the second are the items that could not be read, and why."""
        spec, indices = self._ring.spec, chosen.indices
        fetching = Fetching(self._note, substitute=self._orders.substitute_errors)

        def read() -> Out:
            parts: dict[str, np.ndarray | RowsOut] = {name: slot.field(name)[begin:end] for name in spec.fixed_fields}
            parts |= {name: RowsOut(name, rows, end - begin) for name, rows in spec.rows_fields.items()}
            out = Out(parts, self._noting(indices), first_row=begin, fetch=fetching)
            self._source.read(indices, chosen.draws, out)
            return out

        # Items are noted and retried one by one as they are fetched; a sample that is one, when it is read alone.
        is_item = alone and self._items is None
        if is_item:
            self._note(int(indices[0]))
        with clock.stage("read"):
            out = read_patiently(read) if is_item else read()
        if not fetching.unreadable:
            self._check_all_put(out, indices)
        return out, fetching.unreadable

    def _note(self, item: int) -> None:
        self._at = item
        self._ring.note_item(self._worker, item)

    def _noting(self, indices: np.ndarray) -> ReadingNote | None:
        """Takes down which sample is read, where that says which item is."""
        return None if self._items is not None else lambda sample: self._note(int(indices[sample]))

    def _check_all_put(self, out: Out, indices: np.ndarray) -> None:
        for name in self._ring.spec.rows_fields:
            for sample, rows in enumerate(out[name].taken):
                if rows is None:
                    raise DataError(
                        f"read() put no rows of field '{name}' for sample {indices[sample]}: "
                        f"call out['{name}'].put(i, rows) for every sample, with an empty array where there are none"
                    )


def _describe(error: BaseException, *, row: int, sample: int, item: int = UNKNOWN) -> Failure:
    return Failure(row, sample, cause_of(error), traceback_of(error), item)


def cause_of(error: BaseException) -> str:
    """What went wrong, short enough for a message."""
    return _shortened(f"{type(error).__name__}: {error}", CAUSE_CHARACTERS)


def traceback_of(error: BaseException) -> str:
    """Where it went wrong, short enough for a message."""
    return _shortened("".join(traceback.format_exception(error)), TRACEBACK_CHARACTERS)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"
