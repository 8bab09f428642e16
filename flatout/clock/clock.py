"""Named stages: how long each part of the work takes.

    with clock.stage("decode"):
        image = decode(data)

When recording is off (the default), a mark costs a fraction of a microsecond (bench/clock.py). When it is on, each mark
adds its duration to the table of this thread's recorder: `Totals`, an array of fixed size that may be in shared memory,
so that a parent process can read the times of its workers while they work.

Stages may be nested. `total_ns` is the whole time of a stage; the time of nested stages is also counted separately, so
that self times (`read_self_ns`) add up to the covered time and nothing is counted twice.

STAGES lists the label and kind of each stage. A stage that is not listed is shown under its own name and counts as
"other", so marks can be added anywhere without changing that table.

Must not import torch: workers use this module.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np

STAGE_DTYPE = np.dtype([("name", "S32"), ("runs", np.int64), ("total_ns", np.int64), ("nested_ns", np.int64)])


# Recording


class StageTime(NamedTuple):
    """How often a stage ran, and its total time, nested stages included."""

    runs: int
    total_ns: int


class Totals:
    """Number of runs and total time per stage, in a table of fixed size.

    Only one thread writes a table; any thread or process may read it at any time. A reader may see a run that is
    counted before its duration is, but never a torn number.
    """

    innermost: "_Mark | None" = None
    """The innermost running stage, if any."""

    def __init__(self, table: np.ndarray | None = None, *, capacity: int = 64) -> None:
        """`table` is STAGE_DTYPE [capacity], zeroed by its owner; without it, a private table is created."""
        self.table = np.zeros(capacity, STAGE_DTYPE) if table is None else table
        # Memoryviews: reading or writing a number takes a third of the time that NumPy takes.
        self._runs = self.table["runs"].data
        self._total_ns = self.table["total_ns"].data
        self._inside_ns = self.table["nested_ns"].data
        # The table may contain rows of a worker that this one replaces.
        self._rows = {name: row for row, name in enumerate(read_totals(self.table))}

    def add(self, name: str, duration_ns: int, nested_ns: int = 0) -> None:
        """Count one run of stage `name`, of which `nested_ns` was spent in nested stages."""
        row = self._rows.get(name)
        if row is None:
            row = self._open_row(name)
        self._runs[row] += 1
        self._total_ns[row] += duration_ns
        self._inside_ns[row] += nested_ns

    def opened(self, name: str) -> None:
        """Called when a stage begins; does nothing here, but recorders that keep a timeline override it."""

    def closed(self, name: str, begin_ns: int, end_ns: int, nested_ns: int) -> None:
        """Called when a stage has ended."""
        self.add(name, end_ns - begin_ns, nested_ns)

    def step_ended(self, num_images: int) -> None:
        """Called when a training step has ended; does nothing here, but a `StepRecorder` records each step."""

    def read(self) -> dict[str, StageTime]:
        """Current times of all stages, in order of first appearance."""
        return read_totals(self.table)

    def _open_row(self, name: str) -> int:
        # The last row collects all stages that have no row of their own: a full table loses names, not time.
        row = min(len(self._rows), len(self.table) - 1)
        self.table["name"][row] = name.encode() if row == len(self._rows) else b"(other stages)"
        self._rows[name] = row
        return row


def read_totals(table: np.ndarray) -> dict[str, StageTime]:
    """Times of all stages in a STAGE_DTYPE table, which this or another process may be filling.

    Of several tables, [..., rows], their sums.
    """
    runs, total_ns = _sums(table, "runs", "total_ns")
    return {name: StageTime(runs[name], total_ns[name]) for name in runs}


def read_self_ns(table: np.ndarray) -> dict[str, int]:
    """Time per stage without its nested stages, as `read_totals`; these add up to the time that marks cover."""
    total_ns, nested_ns = _sums(table, "total_ns", "nested_ns")
    return {name: total_ns[name] - nested_ns[name] for name in total_ns}


def _sums(table: np.ndarray, *columns: str) -> list[Counter[str]]:
    """Each of these columns by stage, in order of first appearance, at one moment."""
    sums: list[Counter[str]] = [Counter() for _ in columns]
    for row in table[table["name"] != b""]:
        for of_stage, column in zip(sums, columns, strict=True):
            of_stage[row["name"].decode()] += int(row[column])
    return sums


class _Mark:
    """A running stage; recorded when its block ends, also by an exception.

    It is the innermost stage for exactly the time that is counted for it: a garbage collection may happen during any
    call made here, and its time is subtracted from the stage that is innermost at that moment.
    """

    __slots__ = ("_begin_ns", "_recorder", "name", "nested_ns", "outer")

    def __init__(self, recorder: Totals, name: str) -> None:
        self._recorder = recorder
        self.name = name
        self.nested_ns = 0

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
            outer.nested_ns += end_ns - self._begin_ns
        recorder.closed(self.name, self._begin_ns, end_ns, self.nested_ns)


class _ThreadState(threading.local):
    """The recorder of this thread; None if recording is off."""

    recorder: Totals | None = None


_NULL_MARK = nullcontext()
"""The mark when recording is off: does nothing."""
_thread = _ThreadState()


def stage(name: str) -> nullcontext[None] | _Mark:
    """Context manager that records its block as stage `name` (at most 32 bytes)."""
    recorder = _thread.recorder
    return _NULL_MARK if recorder is None else _Mark(recorder, name)


def count(name: str) -> None:
    """Count one run of `name` without a duration."""
    recorder = _thread.recorder
    if recorder is not None:
        recorder.add(name, 0)


def recorder() -> Totals | None:
    """The recorder of this thread; None if recording is off."""
    return _thread.recorder


def innermost() -> _Mark | None:
    """The innermost running stage of this thread; None if there is none or recording is off."""
    current = _thread.recorder
    return None if current is None else current.innermost


def step_ended(num_images: int) -> None:
    """Notify the recorder of this thread that a training step over `num_images` has ended."""
    recorder = _thread.recorder
    if recorder is not None:
        recorder.step_ended(num_images)


def stop(recorder: Totals) -> None:
    """Stop recording this thread if `recorder` is its current recorder."""
    if _thread.recorder is recorder:
        _thread.recorder = None


@contextmanager
def recording(recorder: Totals | None = None) -> Iterator[Totals]:
    """Record this thread's stages inside the block, in `recorder` or a new table."""
    previous, _thread.recorder = _thread.recorder, Totals() if recorder is None else recorder
    try:
        yield _thread.recorder
    finally:
        _thread.recorder = previous


# Labels and kinds of stages

AHEAD = "ahead"
"""The main thread has queued its part of the step, and the device is still working on it."""


class Stage(NamedTuple):
    """How a stage is displayed and classified."""

    label: str
    kind: str
    """wait, copy, input, compute, loss, update, after, pause, idle or other: its colour, and which rules use it."""


STAGES = {
    "feed.wait": Stage("wait for data", "wait"),
    "feed.start": Stage("start the loader's workers", "pause"),
    "copy": Stage("copy to the device", "copy"),
    "transfer": Stage("copy to the device, during the step", "input"),
    "render": Stage("augment on the device", "input"),
    "prepare": Stage("prepare the batch", "input"),
    "forward": Stage("forward", "compute"),
    "loss": Stage("loss", "loss"),
    "assign": Stage("loss: assignment", "loss"),
    "backward": Stage("backward", "compute"),
    "optimizer": Stage("optimizer", "update"),
    "ema": Stage("moving average (EMA)", "update"),
    "schedule": Stage("schedule", "update"),
    "log": Stage("logging", "after"),
    "validate": Stage("validation", "after"),
    "checkpoint": Stage("checkpoint", "after"),
    "pictures": Stage("plots", "after"),
    "between": Stage("rest of the epoch's end", "after"),
    "gc": Stage("Python's garbage collector", "pause"),
    "graph": Stage("forward, loss and backward (CUDA graph)", "compute"),
    "draw": Stage("draw random numbers", "input"),
    "read": Stage("read: the source's own code", "input"),
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
    "frames": Stage("frames from the store", "input"),
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
    "train.label_sums": "loss",
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
    "plots": "pictures",  # the glossary's word; saved profiles have the older one
}
"""The engine's and other stage names -> the names above, so that rules need only one name per stage."""

PLACES = {
    "host": "main thread",
    "device": "GPU, compute stream",
    "copy": "GPU, other streams",
    "workers": "loader workers (mean per worker)",
}


def canonical(stage: str) -> str:
    """The canonical name of a stage that has several names."""
    return ENGINE.get(stage, stage)


def label_of(stage: str) -> str:
    """The label of a stage; its name if it is not listed."""
    stage = canonical(stage)
    return STAGES[stage].label if stage in STAGES else stage


def kind_of(stage: str) -> str:
    """The kind of a stage; "other" if it is not listed."""
    stage = canonical(stage)
    return STAGES[stage].kind if stage in STAGES else "other"


def place_label(place: str) -> str:
    """The label of a place; its name if it is not listed."""
    return PLACES.get(place, place)


class Event(NamedTuple):
    """One stage on a timeline, in nanoseconds of time.perf_counter_ns(); `depth` 0 is outermost."""

    name: str
    begin_ns: int
    end_ns: int
    depth: int


# Pauses between steps: validations, checkpoints, plots, the end of an epoch.
#
# They are part of a training's time, but of no step: what is marked, waited for or traced in a pause must not be
# mistaken for something that every step does.

PAUSES = frozenset({"between", "validate", "checkpoint", "pictures"})
"""Stages that run between two steps, never inside one."""

LOG = "log"
"""A pause if it only happens now and then; part of the step if it happens in every step."""

ALL_PAUSES = PAUSES | {name for name, stage in ENGINE.items() if stage in PAUSES}
"""PAUSES, and the engine's names for them."""

_APART = frozenset({*PAUSES, LOG, AHEAD})


def is_pause(name: str) -> bool:
    """Whether a stage of this name is a pause; knows the engine's names too."""
    return name in ALL_PAUSES


def pause_stage(mark: _Mark | None) -> str | None:
    """The innermost open stage that is not part of an ordinary step; None within an ordinary step."""
    while mark is not None:
        if (stage := canonical(mark.name)) in _APART:
            return stage
        mark = mark.outer
    return None


def owners(marks: Sequence[tuple[str, int]]) -> list[str]:
    """The stage to which the self time of each mark is attributed: inside a pause, that is the pause.

    Waiting for the images of a validation is validation, not a step that waits for data. Marks are (name, depth) in
    the order in which they ended.
    """
    charged: list[str] = []
    around: list[tuple[int, str | None]] = []  # depth and pause of the enclosing marks
    for name, depth in reversed(marks):
        while around and around[-1][0] >= depth:
            around.pop()
        pause = around[-1][1] if around else None
        owner = name if pause is None or is_pause(name) else pause
        around.append((depth, owner if is_pause(owner) else None))
        charged.append(owner)
    return charged[::-1]
