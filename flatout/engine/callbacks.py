"""What happens in a training, told to whoever wants to hear: five moments, the same for every job.

    start -> (log ... validation ... checkpoint ...) -> end

Subclass `Callback`, override what you need, and give instances to a job's `train(..., callbacks=[...])`. Callbacks are
called in the training's own process, by the first rank only, between steps: what they do takes the training's time.
An exception in one never stops a training. After three it is not called again.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatout.engine.job import IntervalStats
from flatout.errors import one_line

logger = logging.getLogger(__name__)

MOST_ERRORS = 3
MOST_LETTERS = 300

How = Literal["finished", "stopped", "interrupted", "failed"]
"""finished: to its end, or out of patience. stopped: as asked beforehand, by steps or budget. interrupted: by a signal.
Stopped and interrupted trainings are saved and can go on."""


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """A training that is about to take its first step here."""

    job: str
    """ "yolo", "defect" or "spike"."""
    folder: Path
    config: Mapping[str, Any]
    """What the result depends on, in plain values."""
    epoch: int
    """The first one that is trained now."""
    epochs: int
    continues: bool
    """Steps of this run were trained before, by another process."""
    step: int = 0
    """Steps of that epoch that are done. All of them: its end has not been worked off."""
    steps_done: int = 0
    """Of the whole training, by whichever process."""
    histograms: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What is known of the data beforehand; yolo: "classes", the class of every box, [T]."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The end of an epoch."""

    epoch: int
    at: int
    """What charts plot it over: the epoch; for the spike job, optimizer steps."""
    steps_done: int = 0
    """Of the whole training, by whichever process."""
    scalars: Mapping[str, float]
    """Means of the epoch's losses, learning rates, and what a validation found if there was one, under the tags that
    the job's charts have."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A state that is safe on the disk. The file is replaced by the next one: copy it now, or by its open handle."""

    path: Path
    """weights/last.pt. Other files of the folder, such as best.pt, are up to date too."""
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class End:
    """How it ended, here and for now."""

    how: How
    why: str = ""
    """One line; empty where everything went as planned."""
    folder: Path
    epoch: int
    """Epochs that are complete."""


class Callback:
    """Does nothing; override what you want to hear."""

    def start(self, run: RunStart) -> None:
        """Before the first step."""

    def log(self, tick: IntervalStats) -> None:
        """At every log interval: losses, learning rate and speed."""

    def validation(self, scores: Scores) -> None:
        """After every epoch, whether or not it was validated."""

    def checkpoint(self, saved: Saved) -> None:
        """After every save."""

    def end(self, end: End) -> None:
        """After the last step, also of a training that fails; final files are written. Called once."""


class Callbacks(Callback):
    """Several as one, called in their order, none of which can do harm."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self._errors = [0] * len(self._callbacks)
        self._is_under_way = False
        self.epoch = 0
        """Epochs that are complete, as far as was told."""

    def start(self, run: RunStart) -> None:
        self._is_under_way, self.epoch = True, run.epoch
        self._tell("start", run)

    def log(self, tick: IntervalStats) -> None:
        self._tell("log", tick)

    def validation(self, scores: Scores) -> None:
        self.epoch = scores.epoch + 1
        self._tell("validation", scores)

    def checkpoint(self, saved: Saved) -> None:
        self._tell("checkpoint", saved)

    def end(self, end: End) -> None:
        """Only once, and only if there was a start."""
        if self._is_under_way:
            self._is_under_way = False
            self._tell("end", end)

    def _tell(self, moment: str, about: object) -> None:
        for number, callback in enumerate(self._callbacks):
            if self._errors[number] >= MOST_ERRORS:
                continue
            try:
                getattr(callback, moment)(about)
            except Exception as error:
                self._errors[number] += 1
                _warn(f"{type(callback).__name__}.{moment}", error, self._errors[number])


def _warn(where: str, error: Exception, errors: int) -> None:
    what_now = "It is not called again" if errors >= MOST_ERRORS else f"Error {errors} of {MOST_ERRORS}"
    reason = one_line(error, MOST_LETTERS).removesuffix(".")
    logger.warning("%s failed: %s. %s; training goes on.", where, reason, what_now)
    logger.debug("%s failed here:", where, exc_info=error)
