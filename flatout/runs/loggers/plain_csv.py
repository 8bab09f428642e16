"""Logger that writes every number of a training to scalars.csv in the run folder; needs no further package.

    step,epoch,name,value        a row per number: `step/...` at every log interval, the tags of charts after an epoch

Rows are in the order of their steps. A training that is continued, or rolled back after its loss was not finite,
repeats steps: rows from there on are removed first, so that none appears twice.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flatout.engine import Callback, End, IntervalStats, RunStart, Scores
from flatout.runs.folder import Records

NAME = "scalars.csv"
INTERVAL_PREFIX = "step/"
"""Prefix of the names of numbers of a log interval."""


class EventTime(NamedTuple):
    """The position of an event in a training, in ascending order."""

    step: int
    is_validation: bool
    """A validation comes after the log interval that ends at the same step."""


class PlainCsv(Callback):
    """Appends to scalars.csv. A full disk costs rows and one warning, but never the training."""

    def __init__(self) -> None:
        self._records: Records | None = None
        self._path = Path()
        self._epoch = 0
        self._last, self._last_begin = EventTime(-1, False), 0
        """The newest event, and the length of the file before it."""

    def start(self, run: RunStart) -> None:
        self._path, self._epoch = run.folder / NAME, run.epoch
        self._records = Records(run.folder, [NAME])
        if not run.continues:
            self._records.clear()
            return
        # A checkpoint of step 0 was saved after the validation of the epoch before, any other one before a validation
        # that is due at its step.
        repeated = EventTime(run.steps_done + 1, False) if run.step == 0 else EventTime(run.steps_done, True)
        self._truncate(self._begin_of(repeated))

    def log(self, stats: IntervalStats) -> None:
        self._epoch = stats.epoch
        speed = {"step_ms": stats.step_ms, "wait_ms": stats.wait_ms, "samples_per_s": stats.samples_per_s}
        numbers = {**stats.items, "lr": stats.lr, **speed}
        prefixed = {f"{INTERVAL_PREFIX}{name}": value for name, value in numbers.items()}
        self._write(EventTime(stats.steps_done, False), prefixed)

    def validation(self, scores: Scores) -> None:
        # A validation within an epoch reports the epoch before it.
        self._epoch = max(self._epoch, scores.epoch)
        self._write(EventTime(scores.steps_done, True), scores.scalars)

    def end(self, end: End) -> None:
        if self._records is not None:
            self._records.close()

    def _write(self, time: EventTime, numbers: Mapping[str, float]) -> None:
        assert self._records is not None
        if time < self._last:
            self._truncate(self._begin_of(time))
        elif time == self._last:
            # A save reports the interval again, including steps whose numbers had not arrived when it ended.
            self._truncate(self._last_begin)
        self._last, self._last_begin = time, self._path.stat().st_size if self._path.is_file() else 0
        head = {"step": time.step, "epoch": self._epoch}
        self._records.rows(NAME, [{**head, "name": name, "value": value} for name, value in numbers.items()])

    def _truncate(self, length: int) -> None:
        assert self._records is not None
        self._records.load_state_dict({"bytes": {NAME: length}})

    def _begin_of(self, time: EventTime) -> int:
        """Length of the file up to its first row of this time or later, or up to an incomplete row."""
        if not self._path.is_file():
            return 0
        length = 0
        with self._path.open("rb") as lines:
            for line in lines:
                own = _time_of(line.decode(errors="replace"))
                if not line.endswith(b"\n") or (own is not None and own >= time):
                    break
                length += len(line)
        return length


def _time_of(line: str) -> EventTime | None:
    """The time of a row; None for the header, and for marks of missing rows."""
    cells = next(csv.reader([line]), [])
    if len(cells) != 4 or not cells[0].isdecimal():
        return None
    return EventTime(int(cells[0]), not cells[2].startswith(INTERVAL_PREFIX))
