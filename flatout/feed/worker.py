"""What a worker does with a task: draw, read into the slot, hand over its ragged rows, report.

The same loop runs in a process, in a thread, or (one task at a time) in the caller's own thread.
Imports no torch: a worker that did would take seconds longer to start and hundreds of megabytes more.
"""

import contextlib
import itertools
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flatout.errors import DataError
from flatout.feed.philox import Purpose, keyed_uniform
from flatout.feed.ring import Ring, Slot, Task
from flatout.feed.rows import hand_over
from flatout.feed.source import DecodeError, Out, RowsOut, Source
from flatout.profiler import clock
from flatout.profiler.shared_timeline import TracedTotals

WORK, QUIT = b"\x01", b"\x00"
READ_ATTEMPTS = 4
SUBSTITUTES_AT_MOST = 100

# A report must fit into one message, about 200 kB: more would not be cut off but refused.
CAUSE_CHARACTERS = 400
TRACEBACK_CHARACTERS = 40_000
REPLACEMENTS_TOLD = 100


@dataclass(frozen=True, kw_only=True)
class WorkOrders:
    """What every worker of a feed is told once."""

    seed: int
    substitute_errors: bool
    """Unreadable samples (OSError, DecodeError) are replaced instead of reported as failures."""


class Replacement(NamedTuple):
    """A sample that could not be read, and why. Of more than `REPLACEMENTS_TOLD` in a task some are not told."""

    sample: int
    cause: str


class Failure(NamedTuple):
    """An error that must reach the caller; row is the batch row, or -1 if no single sample is to blame."""

    row: int
    sample: int
    cause: str
    traceback: str


class Report(NamedTuple):
    """How a task ended: to be done again if `overflow_bytes` is set, a failure if `failure` is."""

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


class Bench:
    """One worker's place: its ring, its source, and the task on it."""

    def __init__(
        self, worker: int, ring: Ring, source: Source, orders: WorkOrders, send: Callable[[Report], object]
    ) -> None:
        self._worker = worker
        self._send = send
        self._ring = ring
        self._source = source
        self._orders = orders
        self._totals = TracedTotals(ring.stages[worker], ring.timelines[worker : worker + 1])
        self._num_samples = len(source)

    def do_next_task(self) -> None:
        """Claim a task and fill its rows, unless nothing is left to claim.

        The parent is told of trouble, and of a slot that is complete; a message for every task would
        wake it dozens of times per batch. Trouble is told before the task counts as done, so whoever sees
        a complete slot finds everything there is to know about it among the messages sent.
        """
        claimed = self._ring.claim(self._worker)
        if claimed is None:
            return
        ticket, task = claimed
        report = self._report_on(ticket, task)
        if report.is_trouble:
            self._send(report)
        if not report.overflow_bytes and self._ring.finish(task):
            self._send(Report(ticket, self._worker))
        self._ring.put_down(self._worker)

    def _report_on(self, ticket: int, task: Task) -> Report:
        with clock.recording(self._totals):
            try:
                replaced, overflow_bytes = self._fill(task)
                return Report(ticket, self._worker, tuple(replaced[:REPLACEMENTS_TOLD]), overflow_bytes)
            except WorkFailedError as failed:
                return Report(ticket, self._worker, failure=failed.failure)
            except (Exception, SystemExit) as error:
                return Report(ticket, self._worker, failure=_describe(error, row=-1, sample=-1))

    def _fill(self, task: Task) -> tuple[list[Replacement], int]:
        slot = self._ring.slots[task.slot]
        replaced: list[Replacement] = []
        pieces = None if task.singly or self._any_quarantined(slot, task) else self._try_whole(slot, task)
        shown: list[int] = []
        if pieces is None:
            singles = [self._read_one(slot, row, replaced) for row in range(task.begin, task.end)]
            shown, pieces = [index for index, _ in singles], [piece for _, piece in singles]
        with clock.stage("hand over"):
            fields = self._ring.spec.rows_fields
            taken = {name: [rows for piece in pieces for rows in piece[name].taken] for name in fields}
            overflow_bytes = hand_over(self._ring, task, taken) if taken else 0
        if shown and not overflow_bytes:
            # Last: whoever has to do this task again must find the samples that were asked for.
            slot.indices[task.begin : task.end] = shown
        return replaced, overflow_bytes

    def _any_quarantined(self, slot: Slot, task: Task) -> bool:
        return not self._ring.quarantined().isdisjoint(slot.indices[task.begin : task.end].tolist())

    def _try_whole(self, slot: Slot, task: Task) -> list[Out] | None:
        """Read all rows in one call; None if that raised, so that they are tried one by one."""
        try:
            return [self._read(slot, task.begin, task.end, slot.indices[task.begin : task.end])]
        except (Exception, SystemExit):
            # Not swallowed: read again one by one, the error comes back with the sample that caused it.
            return None

    def _read_one(self, slot: Slot, row: int, replaced: list[Replacement]) -> tuple[int, Out]:
        """Read one row: its own sample, or the first substitute that can be read; says which."""
        quarantined = self._ring.quarantined()
        for index in self._candidates(slot, row):
            if index in quarantined:
                continue
            self._ring.note_sample(self._worker, index)
            try:
                return index, self._read_with_retries(slot, row, index)
            except (Exception, SystemExit) as error:
                if not (self._orders.substitute_errors and isinstance(error, OSError | DecodeError)):
                    raise WorkFailedError(_describe(error, row=row, sample=index)) from error
                replaced.append(Replacement(index, cause_of(error)))
        raise DataError(f"{SUBSTITUTES_AT_MOST} substitutes in a row could not be read. Check the data set.")

    def _candidates(self, slot: Slot, row: int) -> Iterator[int]:
        own = int(slot.indices[row])
        epoch, position = int(slot.head["epoch"]), int(slot.positions[row])
        return itertools.chain([own], substitutes(self._orders.seed, epoch, position, self._num_samples))

    def _read_with_retries(self, slot: Slot, row: int, index: int) -> Out:
        # Network disks fail for a moment (EIO, ESTALE): three more tries, 0.7 s in all.
        for attempt in range(1, READ_ATTEMPTS):
            try:
                return self._read(slot, row, row + 1, np.array([index]))
            except (FileNotFoundError, PermissionError):
                raise
            except OSError:
                time.sleep(0.05 * 2**attempt)
        return self._read(slot, row, row + 1, np.array([index]))

    def _read(self, slot: Slot, begin: int, end: int, indices: np.ndarray) -> Out:
        epoch, positions = int(slot.head["epoch"]), slot.positions[begin:end]
        with clock.stage("draw"):
            draws = self._source.draw(self._orders.seed, epoch, positions, indices)
        if draws is None:
            raise DataError(f"{type(self._source).__name__}.draw() returned nothing: return a dict of arrays, or {{}}.")
        spec = self._ring.spec
        parts: dict[str, np.ndarray | RowsOut] = {name: slot.field(name)[begin:end] for name in spec.fixed_fields}
        parts |= {name: RowsOut(name, rows, end - begin) for name, rows in spec.rows_fields.items()}
        note = self._ring.note_sample
        out = Out(parts, lambda sample: note(self._worker, int(indices[sample])), first_row=begin)
        with clock.stage("read"):
            self._source.read(indices, draws, out)
        self._check_all_put(out, indices)
        return out

    def _check_all_put(self, out: Out, indices: np.ndarray) -> None:
        for name in self._ring.spec.rows_fields:
            for sample, rows in enumerate(out[name].taken):
                if rows is None:
                    raise DataError(
                        f"read() put no rows of field '{name}' for sample {indices[sample]}: "
                        f"call out['{name}'].put(i, rows) for every sample, with an empty array where there are none"
                    )


def substitutes(seed: int, epoch: int, position: int, num_samples: int) -> Iterator[int]:
    """Samples to show instead of an unreadable one: a pure function of where it would have been shown."""
    numbers = keyed_uniform(seed, epoch, np.array([position]), SUBSTITUTES_AT_MOST, purpose=Purpose.SUBSTITUTE)[0]
    return (int(number * num_samples) for number in numbers)


def _describe(error: BaseException, *, row: int, sample: int) -> Failure:
    return Failure(row, sample, cause_of(error), traceback_of(error))


def cause_of(error: BaseException) -> str:
    """What went wrong, short enough for a message."""
    return _shortened(f"{type(error).__name__}: {error}", CAUSE_CHARACTERS)


def traceback_of(error: BaseException) -> str:
    """Where it went wrong, short enough for a message."""
    return _shortened("".join(traceback.format_exception(error)), TRACEBACK_CHARACTERS)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"
