"""Where does the time go? Named stages, stamped wherever work is done.

    with clock.stage("decode"):
        image = decode(data)

Off (the default) a mark costs a fraction of a microsecond (bench/clock.py). On, each mark adds its
duration to the table of the recorder installed for this thread: `Totals`, a fixed-size array that may
lie in shared memory, so that a parent process can read what its workers spend while they work.

A stage may nest in another. `total_ns` is its whole time; the time of the stages inside it is counted
apart, so that self times (`read_self_ns`) add up to the time covered and nothing is charged twice.
Imports no torch.

What the stages are called for a person, and what kind of work they are.

A stage that is not listed is shown under its own name and counts as "other": marks may be added anywhere without
touching this table.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

STAGE_DTYPE = np.dtype([("name", "S32"), ("runs", np.int64), ("total_ns", np.int64), ("inside_ns", np.int64)])


class StageTime(NamedTuple):
    """How often a stage ran, and for how long altogether, the stages inside it included."""

    runs: int
    total_ns: int


class Totals:
    """Runs and duration per stage, in a table of fixed size.

    One thread writes a table; any thread or process may read it at any time. A reader may see a
    run counted ahead of its duration, never a torn number.
    """

    innermost: "_Mark | None" = None
    """The stage that runs now, if any."""

    def __init__(self, table: np.ndarray | None = None, *, capacity: int = 64) -> None:
        """`table` is STAGE_DTYPE [capacity], zeroed by its owner; a private one is made without it."""
        self.table = np.zeros(capacity, STAGE_DTYPE) if table is None else table
        # Views of memory: a number in them is read and written in a third of the time NumPy takes.
        self._runs = self.table["runs"].data
        self._total_ns = self.table["total_ns"].data
        self._inside_ns = self.table["inside_ns"].data
        # A table may have been begun by a worker that this one replaces.
        self._rows = {name: row for row, name in enumerate(read_totals(self.table))}

    def add(self, name: str, duration_ns: int, inside_ns: int = 0) -> None:
        """Charge one run of stage `name`, of which `inside_ns` is charged to other stages as well."""
        row = self._rows.get(name)
        if row is None:
            row = self._open_row(name)
        self._runs[row] += 1
        self._total_ns[row] += duration_ns
        self._inside_ns[row] += inside_ns

    def opened(self, name: str) -> None:
        """A stage begins. Nothing to do here; recorders that keep a timeline want to know."""

    def closed(self, name: str, begin_ns: int, end_ns: int, inside_ns: int) -> None:
        """A stage has ended."""
        self.add(name, end_ns - begin_ns, inside_ns)

    def step_ended(self, num_images: int) -> None:
        """A training step has ended. Totals do not tell steps apart; a `StepRecorder` does."""

    def read(self) -> dict[str, StageTime]:
        """The table as it stands, in order of first appearance."""
        return read_totals(self.table)

    def _open_row(self, name: str) -> int:
        # The last row collects whatever has no row of its own: a full table loses names, not time.
        row = min(len(self._rows), len(self.table) - 1)
        self.table["name"][row] = name.encode() if row == len(self._rows) else b"(other stages)"
        self._rows[name] = row
        return row


def read_totals(table: np.ndarray) -> dict[str, StageTime]:
    """Stages of a STAGE_DTYPE table that this or another process fills."""
    used = table[table["name"] != b""]
    return {row["name"].decode(): StageTime(int(row["runs"]), int(row["total_ns"])) for row in used}


def read_self_ns(table: np.ndarray) -> dict[str, int]:
    """Time per stage without the stages inside it: these add up to the time that is covered by marks."""
    used = table[table["name"] != b""]
    return {row["name"].decode(): int(row["total_ns"] - row["inside_ns"]) for row in used}


class _Off:
    """The mark that does nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


class _Mark:
    """A running stage; charged when the block ends, also by an exception.

    It is the innermost one for no longer than its time counts: a garbage collection may come at any call made here, and
    is taken off the stage that is innermost then.
    """

    __slots__ = ("_begin_ns", "_recorder", "inside_ns", "name", "outer")

    def __init__(self, recorder: Totals, name: str) -> None:
        self._recorder = recorder
        self.name = name
        self.inside_ns = 0

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder.opened(self.name)
        self.outer, recorder.innermost = recorder.innermost, self
        self._begin_ns = time.perf_counter_ns()

    def __exit__(self, *exc_info: object) -> None:
        recorder, outer = self._recorder, self.outer
        recorder.innermost = outer
        end_ns = time.perf_counter_ns()
        if outer is not None:
            outer.inside_ns += end_ns - self._begin_ns
        recorder.closed(self.name, self._begin_ns, end_ns, self.inside_ns)


class _Thread(threading.local):
    """Who takes this thread's marks; None is off."""

    recorder: Totals | None = None


_OFF = _Off()
_thread = _Thread()


def stage(name: str) -> _Off | _Mark:
    """Context manager around the work of stage `name` (32 bytes at most)."""
    recorder = _thread.recorder
    return _OFF if recorder is None else _Mark(recorder, name)


def count(name: str) -> None:
    """Charge one run of `name` that takes no time worth measuring."""
    recorder = _thread.recorder
    if recorder is not None:
        recorder.add(name, 0)


def recorder() -> Totals | None:
    """Who takes this thread's marks; None: nobody."""
    return _thread.recorder


def innermost() -> _Mark | None:
    """The stage of this thread that runs now, if any; None also where nobody takes its marks."""
    taker = _thread.recorder
    return None if taker is None else taker.innermost


def step_ended(num_images: int) -> None:
    """Tell the recorder of this thread that a training step over `num_images` has ended."""
    recorder = _thread.recorder
    if recorder is not None:
        recorder.step_ended(num_images)


def stop(recorder: Totals) -> None:
    """Take no more marks of this thread, if `recorder` is the one that takes them."""
    if _thread.recorder is recorder:
        _thread.recorder = None


@contextmanager
def recording(recorder: Totals | None = None) -> Iterator[Totals]:
    """Record this thread's marks inside the block, into `recorder` or a table of its own."""
    previous, _thread.recorder = _thread.recorder, Totals() if recorder is None else recorder
    try:
        yield _thread.recorder
    finally:
        _thread.recorder = previous


AHEAD = "ahead"
"""The main thread has queued its part of the step, and the device is still at it."""


class Stage(NamedTuple):
    """How a stage is shown."""

    label: str
    kind: str
    """wait, copy, input, compute, loss, update, after, pause, idle or other: its colour, and which rules look at it."""


STAGES = {
    "feed.wait": Stage("wait for data", "wait"),
    "copy": Stage("copy to the device", "copy"),
    "transfer": Stage("copy to the device, beside the step", "input"),
    "render": Stage("augment on the device", "input"),
    "prepare": Stage("prepare the batch", "input"),
    "forward": Stage("forward", "compute"),
    "loss": Stage("loss", "loss"),
    "assign": Stage("loss: assignment", "loss"),
    "backward": Stage("backward", "compute"),
    "optimizer": Stage("optimizer", "update"),
    "ema": Stage("weight average (EMA)", "update"),
    "schedule": Stage("schedule", "update"),
    "log": Stage("logging", "after"),
    "validate": Stage("validation", "after"),
    "checkpoint": Stage("checkpoint", "after"),
    "pictures": Stage("pictures for people", "after"),
    "between": Stage("end of an epoch, the rest of it", "after"),
    "gc": Stage("Python's garbage collector", "pause"),
    "graph": Stage("forward, loss and backward (CUDA graph)", "compute"),
    "draw": Stage("draw random numbers", "input"),
    "read": Stage("read: own work", "input"),
    "fetch": Stage("dataset[i]", "input"),
    "decode": Stage("decode", "input"),
    "resize": Stage("resize", "input"),
    "mosaic": Stage("mosaic", "input"),
    "warp": Stage("warp", "input"),
    "color": Stage("colour", "input"),
    "labels": Stage("labels", "input"),
    "augment": Stage("augment", "input"),
    "deliver": Stage("flip and write", "input"),
    "collate": Stage("collate", "input"),
    "hand over": Stage("hand over", "input"),
    "frames": Stage("frames out of the store", "input"),
    "spikes": Stage("cut and count spikes", "input"),
    "store miss": Stage("decode (not in the store)", "input"),
    AHEAD: Stage("ahead of the device", "idle"),
    "unexplained": Stage("unexplained", "other"),
    "idle": Stage("idle", "idle"),
}

ENGINE = {
    "train.wait": "feed.wait",
    "train.inputs": "prepare",
    "train.forward": "forward",
    "train.loss": "loss",
    "train.backward": "backward",
    "train.graph": "graph",
    "train.optimizer": "optimizer",
    "train.average": "ema",
    "train.log": "log",
    "train.validate": "validate",
    "train.save": "checkpoint",
    "train.pictures": "pictures",
    "train.between": "between",
    "train.drain": AHEAD,
}
"""The engine's marks -> the names above: a rule knows one name for one thing."""

PLACES = {
    "host": "main thread",
    "device": "GPU, compute stream",
    "copy": "GPU, other streams",
    "workers": "loader workers (one, on average)",
}


def canonical(stage: str) -> str:
    """The one name of a stage that goes by several."""
    return ENGINE.get(stage, stage)


def label_of(stage: str) -> str:
    """The stage in words."""
    stage = canonical(stage)
    return STAGES[stage].label if stage in STAGES else stage


def kind_of(stage: str) -> str:
    """What kind of work it is."""
    stage = canonical(stage)
    return STAGES[stage].kind if stage in STAGES else "other"


def place_label(place: str) -> str:
    """The place in words."""
    return PLACES.get(place, place)


class Event(NamedTuple):
    """One stage on a timeline, in nanoseconds of time.perf_counter_ns(); `depth` 0 is outermost."""

    name: str
    begin_ns: int
    end_ns: int
    depth: int


# What happens between steps: a validation, a checkpoint, pictures for people, the end of an epoch.
#
# It is part of the time that a training takes, and of no step: whatever is marked, waited for or traced in a pause
# must not be taken for something that every step does.

PAUSES = frozenset({"between", "validate", "checkpoint", "pictures"})
"""Stages that run between two steps, never inside one."""

LOG = "log"
"""Between steps if it comes now and then; part of a step if it comes with every one."""

PAUSING = PAUSES | {name for name, stage in ENGINE.items() if stage in PAUSES}
"""The same and the engine's own names for them."""

_APART = frozenset({*PAUSES, LOG, AHEAD})


def is_pause(name: str) -> bool:
    """Whether a mark of this name is a pause; the engine's own names too."""
    return name in PAUSING


def stage_apart(mark: _Mark | None) -> str | None:
    """Innermost of the open stages that are no part of an ordinary step; None inside of one."""
    while mark is not None:
        if (stage := canonical(mark.name)) in _APART:
            return stage
        mark = mark.outer
    return None


def owners(marks: Sequence[tuple[str, int]]) -> list[str]:
    """To which stage each mark's own time is charged: inside a pause, to the pause.

    Waiting for the pictures of a validation is validation, not a step that waits for data. Marks are (name, depth) in
    the order of their ends.
    """
    charged: list[str] = []
    around: list[tuple[int, str | None]] = []  # depth and owner of what encloses the mark
    for name, depth in reversed(marks):
        while around and around[-1][0] >= depth:
            around.pop()
        pause = around[-1][1] if around else None
        owner = name if pause is None or is_pause(name) else pause
        around.append((depth, owner if is_pause(owner) else None))
        charged.append(owner)
    return charged[::-1]
