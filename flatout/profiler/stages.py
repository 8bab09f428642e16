"""What the stages are called for a person, and what kind of work they are.

A stage that is not listed is shown under its own name and counts as "other": marks may be added anywhere without
touching this table.
"""

from typing import NamedTuple

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
