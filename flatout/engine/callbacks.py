"""Callbacks: five events of a training run, the same for every job.

    start -> (log ... validation ... checkpoint ...) -> end

Subclass `Callback`, override the methods you need, and pass instances to a job's `train(..., callbacks=[...])`.
Callbacks run in the training process, on the first rank only, between steps: the time they take is training time. An
exception in a callback never stops the training; after three exceptions the callback is no longer called.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatout.clock import span
from flatout.engine.job import IntervalStats
from flatout.errors import one_line

logger = logging.getLogger(__name__)

MAX_ERRORS = 3
MAX_CHARACTERS = 300

RunOutcome = Literal["finished", "stopped", "interrupted", "failed"]
"""How a training ended. finished: all epochs trained, or early stopping by patience. stopped: by a limit that was set
beforehand, on steps or budget. interrupted: by a signal. Stopped and interrupted trainings are saved and can be
continued."""


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """A training that is about to take its first step in this process."""

    job: str
    """Name of the job, such as "yolo"."""
    folder: Path
    config: Mapping[str, Any]
    """The settings that determine the result, in plain values."""
    epoch: int
    """The first epoch to be trained in this process."""
    epochs: int
    continues: bool
    """Whether an earlier process has already trained steps of this run."""
    step: int = 0
    """Steps of that epoch that are done. If all of them are, its validation and records are still to do."""
    steps_done: int = 0
    """Steps done in the whole training, by all processes."""
    histograms: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Distributions of the training data; yolo: "classes", the class of every box, [T]."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The end of an epoch."""

    epoch: int
    at: int
    """The x value for charts: the epoch; for the spike job, optimizer steps."""
    steps_done: int = 0
    """Steps done in the whole training, by all processes."""
    scalars: Mapping[str, float]
    """Mean losses of the epoch, learning rates and, if the epoch was validated, its scores, by chart tag."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is safely on disk. The next save replaces the file: copy it, or open it, now."""

    path: Path
    """weights/last.pt. Other files in the folder, such as best.pt, are up to date as well."""
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of the training in this process; an unfinished run can be continued later."""

    how: RunOutcome
    why: str = ""
    """The reason in one line; empty if the training finished normally."""
    folder: Path
    epoch: int
    """Completed epochs."""


class Callback:
    """Base class of callbacks; every method does nothing until it is overridden."""

    def start(self, run: RunStart) -> None:
        """Called before the first step."""

    def log(self, stats: IntervalStats) -> None:
        """Called at every log interval with losses, learning rate and speed."""

    def validation(self, scores: Scores) -> None:
        """Called with the numbers of an epoch: after its validation, or at its end if no validation was due; also after
        a validation within an epoch."""

    def checkpoint(self, saved: Saved) -> None:
        """Called after every save."""

    def end(self, end: End) -> None:
        """Called once, after the last step and after the final files are written; also when the training fails."""


class Callbacks(Callback):
    """A list of callbacks, called in order. Exceptions are caught and logged; after three, one is not called again."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self._errors = [0] * len(self._callbacks)
        self._has_started = False
        self.epoch = 0
        """Completed epochs, according to the events so far."""

    def start(self, run: RunStart) -> None:
        self._has_started, self.epoch = True, run.epoch
        self._notify("start", run)

    def log(self, stats: IntervalStats) -> None:
        self._notify("log", stats)

    def validation(self, scores: Scores) -> None:
        self.epoch = scores.epoch + 1
        self._notify("validation", scores)

    def checkpoint(self, saved: Saved) -> None:
        self._notify("checkpoint", saved)

    def end(self, end: End) -> None:
        """Passed on only once, and only after a start."""
        if self._has_started:
            self._has_started = False
            self._notify("end", end)

    def _notify(self, event: str, details: object) -> None:
        for number, callback in enumerate(self._callbacks):
            if self._errors[number] >= MAX_ERRORS:
                continue
            try:
                with span("callbacks"):
                    getattr(callback, event)(details)
            except Exception as error:  # code of the user: no error in it may stop the training
                self._errors[number] += 1
                _warn(f"{type(callback).__name__}.{event}", error, self._errors[number])


def _warn(method: str, error: Exception, num_errors: int) -> None:
    consequence = "It will not be called again" if num_errors >= MAX_ERRORS else f"Error {num_errors} of {MAX_ERRORS}"
    reason = one_line(error, MAX_CHARACTERS).removesuffix(".")
    logger.warning("%s failed: %s. %s; training goes on.", method, reason, consequence)
    logger.debug("%s failed here:", method, exc_info=error)
