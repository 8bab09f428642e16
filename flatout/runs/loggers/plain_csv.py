"""Every number of a training in one plain table, scalars.csv in the run folder: nothing to install.

    step,epoch,name,value        a row per number: `step/...` at every log interval, the tags of charts after an epoch

Rows stand in the order of their steps. A training that is continued, or set back to an earlier state after its loss was
not finite, repeats steps: rows from there on are cut off first, so that none is there twice.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flatout.engine import Callback, End, IntervalStats, RunStart, Scores
from flatout.runs.folder import Records

NAME = "scalars.csv"
WITHIN = "step/"
"""Before the names of what is told at a log interval."""


class Moment(NamedTuple):
    """When something was told; moments of a training ascend."""

    step: int
    is_scored: bool
    """Validation comes after the log interval that ends at the same step."""


class PlainCsv(Callback):
    """Appends to scalars.csv. A full disk costs rows and one warning, never the training."""

    def __init__(self) -> None:
        self._records: Records | None = None
        self._path = Path()
        self._epoch = 0
        self._last, self._last_begin = Moment(-1, False), 0
        """The newest moment, and the length of the file before it."""

    def start(self, run: RunStart) -> None:
        self._path, self._epoch = run.folder / NAME, run.epoch
        self._records = Records(run.folder, [NAME])
        if not run.continues:
            self._records.clear()
            return
        # A state of step 0 was saved after the validation of the epoch before; any other, before one that is due there.
        repeats = Moment(run.steps_done + 1, False) if run.step == 0 else Moment(run.steps_done, True)
        self._cut(self._begin_of(repeats))

    def log(self, tick: IntervalStats) -> None:
        self._epoch = tick.epoch
        speed = {"step_ms": tick.step_ms, "wait_ms": tick.wait_ms, "samples_per_s": tick.samples_per_s}
        numbers = {**tick.items, "lr": tick.lr, **speed}
        self._write(Moment(tick.steps_done, False), {f"{WITHIN}{name}": value for name, value in numbers.items()})

    def validation(self, scores: Scores) -> None:
        # One within an epoch counts the epochs before it.
        self._epoch = max(self._epoch, scores.epoch)
        self._write(Moment(scores.steps_done, True), scores.scalars)

    def end(self, end: End) -> None:
        if self._records is not None:
            self._records.close()

    def _write(self, moment: Moment, numbers: Mapping[str, float]) -> None:
        assert self._records is not None
        if moment < self._last:
            self._cut(self._begin_of(moment))
        elif moment == self._last:
            # A save reports once more, with steps whose numbers had not arrived when the interval ended.
            self._cut(self._last_begin)
        self._last, self._last_begin = moment, self._path.stat().st_size if self._path.is_file() else 0
        head = {"step": moment.step, "epoch": self._epoch}
        self._records.rows(NAME, [{**head, "name": name, "value": value} for name, value in numbers.items()])

    def _cut(self, length: int) -> None:
        assert self._records is not None
        self._records.load_state_dict({"bytes": {NAME: length}})

    def _begin_of(self, moment: Moment) -> int:
        """Length of the file up to its first row of this moment or a later one, or to a row that is not whole."""
        if not self._path.is_file():
            return 0
        length = 0
        with self._path.open("rb") as lines:
            for line in lines:
                own = _moment_of(line.decode(errors="replace"))
                if not line.endswith(b"\n") or (own is not None and own >= moment):
                    break
                length += len(line)
        return length


def _moment_of(line: str) -> Moment | None:
    """None for the first line, and for marks where rows are missing."""
    cells = next(csv.reader([line]), [])
    if len(cells) != 4 or not cells[0].isdecimal():
        return None
    return Moment(int(cells[0]), not cells[2].startswith(WITHIN))
