"""Where does the time go? Named stages, stamped wherever work is done.

    with clock.stage("decode"):
        image = decode(data)

Off (the default) a mark costs a fraction of a microsecond (bench/clock.py). On, each mark adds its
duration to the table of the recorder installed for this thread: `Totals`, a fixed-size array that may
lie in shared memory, so that a parent process can read what its workers spend while they work.

A stage may nest in another; both are charged their whole time. Imports no torch.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

STAGE_DTYPE = np.dtype([("name", "S32"), ("runs", np.int64), ("total_ns", np.int64)])


class StageTime(NamedTuple):
    """How often a stage ran, and for how long altogether."""

    runs: int
    total_ns: int


class Totals:
    """Runs and duration per stage, in a table of fixed size.

    One thread writes a table; any thread or process may read it at any time. A reader may see a
    run counted ahead of its duration, never a torn number.
    """

    def __init__(self, table: np.ndarray | None = None, *, capacity: int = 64) -> None:
        """`table` is STAGE_DTYPE [capacity], zeroed by its owner; a private one is made without it."""
        self._table = np.zeros(capacity, STAGE_DTYPE) if table is None else table
        self._runs = self._table["runs"]
        self._total_ns = self._table["total_ns"]
        # A table may have been begun by a worker that this one replaces.
        self._rows = {name: row for row, name in enumerate(read_totals(self._table))}

    def add(self, name: str, duration_ns: int) -> None:
        """Charge one run of stage `name`."""
        row = self._rows.get(name)
        if row is None:
            row = self._open_row(name)
        self._runs[row] += 1
        self._total_ns[row] += duration_ns

    def read(self) -> dict[str, StageTime]:
        """The table as it stands, in order of first appearance."""
        return read_totals(self._table)

    def _open_row(self, name: str) -> int:
        # The last row collects whatever has no row of its own: a full table loses names, not time.
        row = min(len(self._rows), len(self._table) - 1)
        self._table["name"][row] = name.encode() if row == len(self._rows) else b"(other stages)"
        self._rows[name] = row
        return row


def read_totals(table: np.ndarray) -> dict[str, StageTime]:
    """Stages of a STAGE_DTYPE table that this or another process fills."""
    used = table[table["name"] != b""]
    return {row["name"].decode(): StageTime(int(row["runs"]), int(row["total_ns"])) for row in used}


class _Off:
    """The mark that does nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


class _Mark:
    """A running stage; charged when the block ends, also by an exception."""

    __slots__ = ("_begin_ns", "_name", "_totals")

    def __init__(self, totals: Totals, name: str) -> None:
        self._totals = totals
        self._name = name

    def __enter__(self) -> None:
        self._begin_ns = time.perf_counter_ns()

    def __exit__(self, *exc_info: object) -> None:
        self._totals.add(self._name, time.perf_counter_ns() - self._begin_ns)


class _Recorder(threading.local):
    """Who takes this thread's marks; None is off."""

    totals: Totals | None = None


_OFF = _Off()
_recorder = _Recorder()


def stage(name: str) -> _Off | _Mark:
    """Context manager around the work of stage `name` (32 bytes at most)."""
    totals = _recorder.totals
    return _OFF if totals is None else _Mark(totals, name)


def count(name: str) -> None:
    """Charge one run of `name` that takes no time worth measuring."""
    totals = _recorder.totals
    if totals is not None:
        totals.add(name, 0)


@contextmanager
def recording(totals: Totals | None = None) -> Iterator[Totals]:
    """Record this thread's marks inside the block, into `totals` or a table of its own."""
    previous, _recorder.totals = _recorder.totals, Totals() if totals is None else totals
    try:
        yield _recorder.totals
    finally:
        _recorder.totals = previous
