"""How far is a long piece of work, and when will it be done? A bar on a terminal, else a line now and then.

How far is the training, how fast, and when will it be done? A bar on a terminal, else a line now and then.

Times come from the monotonic clock alone: a clock that is set, or an hour that daylight saving takes, changes no ETA.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 5.0

Advance = Callable[[int, int], None]
"""Called with the items done so far and the bytes they take."""


@contextmanager
def progress(title: str, total: int, *, shown: bool = True) -> Iterator[Advance]:
    """Show the progress of `total` items while the block runs."""
    if not shown:
        yield lambda done, nbytes: None
    elif sys.stderr.isatty():
        with _bar(title, total) as advance:
            yield advance
    else:
        yield _Lines(title, total)


def progress_line(title: str, done: int, total: int, nbytes: int, elapsed_s: float) -> str:
    """'decoding: 300/1000 items, 280 MB, 150 items/s, 5 s left'."""
    rate = done / max(elapsed_s, 1e-9)
    left = f"{(total - done) / rate:.0f} s left" if done else "just begun"
    return f"{title}: {done}/{total} items, {nbytes / 1e6:.0f} MB, {rate:.0f} items/s, {left}"


class _Lines:
    """One log line every few seconds; nothing for work that is done sooner."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._begin_s = self._told_s = time.monotonic()

    def __call__(self, done: int, nbytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= LINE_INTERVAL_S:
            self._told_s = now_s
            logger.info("%s", progress_line(self._title, done, self._total, nbytes, now_s - self._begin_s))


@contextmanager
def _bar(title: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[mb]:.0f} MB"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, mb=0.0)
        yield lambda done, nbytes: bar.update(task, completed=done, mb=nbytes / 1e6)


STEP_LINE_INTERVAL_S = 10.0
_MEMORY_S = 30.0
_LEAST_INTERVALS = 5
"""The ETA follows the speed of about the last half minute, and of no fewer intervals than these."""
_DWARFS = 3.0
"""A pause so many times as long as any other comes once."""


class StepProgress:
    """Told after some steps how many are done, it shows where the training is. Context manager."""

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "train",
        every_s: float = STEP_LINE_INTERVAL_S,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """On a `stream` (stderr) that is a terminal a bar is drawn; elsewhere lines go to the log every `every_s`."""
        self._total, self._title, self._every_s, self._clock = total_steps, title, every_s, clock
        self._stream = stream or sys.stderr
        self._pace = Pace(0, clock())
        self._told_s: float | None = None
        self._bar: tuple[Progress, TaskID] | None = None

    def start_at(self, done: int) -> None:
        """So many steps were done before this process began, and say nothing about its speed."""
        self._pace = Pace(done, self._clock())

    def advance(self, done: int, figures: Mapping[str, str] | None = None) -> None:
        """`done` steps of all are done; `figures` are shown behind the step as 'box 0.0413  lr 9.2e-03'."""
        now_s = self._clock()
        self._pace.update(done, now_s)
        texts = [f"{name} {value}" for name, value in (figures or {}).items()]
        if self._bar is not None:
            progress, task = self._bar
            left = eta_text(self._pace.seconds_for(self._total - done), is_bound=self._pace.is_bound)
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
    """Seconds per step, and what pauses add to them. Costs that come once are not extrapolated.

    The first interval of a process holds its start: kernels are chosen, compiled, captured. It says no more than how
    long a step takes at most. Later on a typical step is the median of the latest intervals, and what an interval took
    beyond it is a pause: validation comes again and counts, a single pause that dwarfs the others does not.
    """

    def __init__(self, done: int, now_s: float) -> None:
        self._done, self._now_s = done, now_s
        self._first_step_s: float | None = None
        self._latest: deque[tuple[float, float]] = deque()
        """Seconds, and seconds per step, of the latest intervals after the first."""
        self._pauses_s: list[float] = []
        self._num_steps = 0

    def update(self, done: int, now_s: float) -> None:
        num_steps, seconds = done - self._done, max(0.0, now_s - self._now_s)
        if num_steps <= 0:
            return
        self._done, self._now_s = done, now_s
        if self._first_step_s is None:
            self._first_step_s = seconds / num_steps
            return
        self._latest.append((seconds, seconds / num_steps))
        while len(self._latest) > _LEAST_INTERVALS and sum(spent_s for spent_s, _ in self._latest) > _MEMORY_S:
            self._latest.popleft()
        self._num_steps += num_steps
        self._pauses_s.append(max(0.0, seconds - num_steps * self._step_s))

    @property
    def is_bound(self) -> bool:
        """Whether `seconds_for` says how long it takes at most, not about how long."""
        return not self._latest

    def seconds_for(self, num_steps: int) -> float | None:
        """How long these steps will take; None before the first one."""
        if self._first_step_s is None:
            return None
        per_step_s = self._first_step_s if self.is_bound else self._step_s + self._paused_s / self._num_steps
        return max(0, num_steps) * per_step_s

    @property
    def _step_s(self) -> float:
        return median(step_s for _, step_s in self._latest)

    @property
    def _paused_s(self) -> float:
        """Seconds of all pauses, less one that came once."""
        *others, longest = sorted(self._pauses_s)
        came_once = longest > _DWARFS * (others[-1] if others else 0.0)
        return sum(others) + (0.0 if came_once else longest)


def step_line(title: str, done: int, total: int, figures: list[str], pace: Pace) -> str:
    """'train  1200/5000   24 %  box 0.0413  lr 9.2e-03  10:26 left', aligned from line to line."""
    width = len(str(total))
    head = f"{title}  {done:>{width}}/{total}  {100 * done / max(1, total):3.0f} %"
    return "  ".join([head, *figures, eta_text(pace.seconds_for(total - done), is_bound=pace.is_bound)])


def eta_text(seconds: float | None, *, is_bound: bool = False) -> str:
    """'1:02:03 left', '10:26 left', 'at most 10:26 left'."""
    if seconds is None:
        return "just begun"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    clock = f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"at most {clock} left" if is_bound and seconds >= 1 else f"{clock} left"


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
