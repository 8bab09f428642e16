"""What the stages are called for a person, and what kind of work they are.

A stage that is not listed is shown under its own name and counts as "other": marks may be added anywhere without
touching this table.
"""

from collections.abc import Sequence
from typing import NamedTuple

from flatout.clock.clock import _Mark

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
