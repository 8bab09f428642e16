"""How far is the training, how fast, and when will it be done? A bar on a terminal, else a line now and then.

Times come from the monotonic clock alone: a clock that is set, or an hour that daylight saving takes, changes no ETA.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0
_MEMORY_S = 30.0
"""The ETA follows the speed of about the last half minute."""


class StepProgress:
    """Told after some steps how many are done, it shows where the training is. Context manager.

    `start` steps were done before this process began, and say nothing about its speed.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start: int = 0,
        title: str = "train",
        every_s: float = LINE_INTERVAL_S,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """On a `stream` (stderr) that is a terminal a bar is drawn; elsewhere lines go to the log every `every_s`."""
        self._total, self._title, self._every_s, self._clock = total_steps, title, every_s, clock
        self._stream = stream or sys.stderr
        self._pace = Pace(start, clock())
        self._told_s: float | None = None
        self._bar: tuple[Progress, TaskID] | None = None

    def advance(self, done: int, figures: Mapping[str, str] | None = None) -> None:
        """`done` steps of all are done; `figures` are shown behind the step as 'box 0.0413  lr 9.2e-03'."""
        now_s = self._clock()
        self._pace.update(done, now_s)
        texts = [f"{name} {value}" for name, value in (figures or {}).items()]
        if self._bar is not None:
            progress, task = self._bar
            left = eta_text(self._pace.seconds_for(self._total - done))
            progress.update(task, completed=done, figures="  ".join([*texts, left]))
        elif self._is_due(done, now_s):
            self._told_s = now_s
            logger.info("%s", step_line(self._title, done, self._total, texts, self._pace))

    def say(self, text: str) -> None:
        """A line in the log; above the bar where both are on the terminal."""
        if self._bar is not None and sys.stdout.isatty():
            self._bar[0].console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            logger.info("%s", text)

    def _is_due(self, done: int, now_s: float) -> bool:
        return self._told_s is None or done >= self._total or now_s - self._told_s >= self._every_s

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._bar = _open_bar(self._stream, self._title, self._total)
            self._bar[0].start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


class Pace:
    """Seconds per step, lately: a mean in which a step counts for less the longer it is ago."""

    def __init__(self, done: int, now_s: float) -> None:
        self._done, self._now_s = done, now_s
        self._step_s: float | None = None

    def update(self, done: int, now_s: float) -> None:
        num_steps, seconds = done - self._done, max(0.0, now_s - self._now_s)
        if num_steps <= 0:
            return
        weight = 1.0 if self._step_s is None else min(1.0, seconds / _MEMORY_S)
        self._step_s = weight * (seconds / num_steps) + (1 - weight) * (self._step_s or 0.0)
        self._done, self._now_s = done, now_s

    def seconds_for(self, num_steps: int) -> float | None:
        """How long these steps will take; None before the first one."""
        return None if self._step_s is None else max(0, num_steps) * self._step_s


def step_line(title: str, done: int, total: int, figures: list[str], pace: Pace) -> str:
    """'train  1200/5000   24 %  box 0.0413  lr 9.2e-03  10:26 left', aligned from line to line."""
    width = len(str(total))
    head = f"{title}  {done:>{width}}/{total}  {100 * done / max(1, total):3.0f} %"
    return "  ".join([head, *figures, eta_text(pace.seconds_for(total - done))])


def eta_text(seconds: float | None) -> str:
    """'1:02:03 left', '10:26 left'."""
    if seconds is None:
        return "just begun"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02} left" if hours else f"{minute}:{second:02} left"


def _open_bar(stream: TextIO, title: str, total: int) -> "tuple[Progress, TaskID]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    progress = Progress(*columns, console=Console(file=stream), transient=True, redirect_stdout=False)
    return progress, progress.add_task(title, total=total, figures="")
