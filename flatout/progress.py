"""Progress of long work and of trainings: a bar on a terminal, otherwise a log line every few seconds.

All times come from the monotonic clock, so that setting the clock or daylight saving time does not affect the ETA.
"""

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

logger = logging.getLogger(__name__)

# Progress of any work

LINE_INTERVAL_S = 5.0

Advance = Callable[[int, int], None]
"""Called with the number of items done so far and their size in bytes."""


@contextmanager
def progress(
    title: str, total: int, *, shown: bool = True, bar: bool = True, unit: str = "items", begin: int = 0
) -> Iterator[Advance]:  # fmt: skip
    """Show the progress of `total` items while the block runs; gives `advance(items so far, bytes so far)`.

    `unit` is what the items are, such as MB; `begin` of them were done earlier, and do not count for the speed. Without
    `bar`, there are log lines even on a terminal: for work beside other work that has a bar.
    """
    if not shown:
        yield lambda done, nbytes: None
    elif bar and sys.stderr.isatty():
        with _bar(title, total, unit) as advance:
            yield advance
    else:
        yield _log_lines(title, total, unit, begin)


def progress_line(
    title: str, done: int, total: int, nbytes: int, elapsed_s: float, *, unit: str = "items", begin: int = 0
) -> str:
    """Progress as text: 'decoding: 300/1000 items, 280 MB, 150 items/s, 5 s left'; no size if it is not known, or if it
    is the unit."""
    rate = (done - begin) / max(elapsed_s, 1e-9)
    left = f"{(total - done) / rate:.0f} s left" if done > begin else "just started"
    size = "" if unit == "MB" or not nbytes else f" {nbytes / 1e6:.0f} MB,"
    speed = f"{rate:.0f}" if rate >= 10 or not rate else f"{rate:.1f}"
    return f"{title}: {done}/{total} {unit},{size} {speed} {unit}/s, {left}"


def _log_lines(title: str, total: int, unit: str, begin: int) -> Advance:
    """Writes a log line every few seconds; none for work that ends sooner."""
    begin_s = logged_s = time.monotonic()

    def advance(done: int, nbytes: int) -> None:
        nonlocal logged_s
        now_s = time.monotonic()
        if now_s - logged_s >= LINE_INTERVAL_S:
            logged_s = now_s
            line = progress_line(title, done, total, nbytes, now_s - begin_s, unit=unit, begin=begin)
            logger.info("%s", line)

    return advance


@contextmanager
def _bar(title: str, total: int, unit: str) -> Iterator[Advance]:
    from rich.progress import TimeRemainingColumn

    def items(nbytes: int) -> str:
        return unit if unit == "MB" or not nbytes else f"{unit}, {nbytes / 1e6:.0f} MB"

    bar, task = _open_bar(
        sys.stderr, title, total, "{task.fields[items]}", TimeRemainingColumn(), redirect_stdout=True, items=items(0)
    )
    with bar:
        yield lambda done, nbytes: bar.update(task, completed=done, items=items(nbytes))


# Progress of a training

STEP_LINE_INTERVAL_S = 10.0
_WINDOW_S = 30.0
_MIN_INTERVALS = 5
"""The ETA is based on about the last half minute, and on at least this many intervals."""
_OUTLIER = 3.0
"""A pause this many times as long as any other is taken for a one-time cost."""
_EPOCHS = 5
"""The pause after an epoch is the median of this many of the latest ones."""


class StepProgress:
    """Shows the progress of a training, in steps. A context manager."""

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "train",
        steps_per_epoch: int = 0,
        every_s: float = STEP_LINE_INTERVAL_S,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """If `stream` (stderr) is a terminal, a bar is shown there; otherwise a line is logged every `every_s`.

        `steps_per_epoch`: a pause follows every so many steps, such as a validation; 0: none does.
        """
        self._total, self._title, self._every_s, self._clock = total_steps, title, every_s, clock
        self._steps_per_epoch = steps_per_epoch
        self._stream = stream or sys.stderr
        self._pace = Pace(0, clock(), steps_per_epoch)
        self._waited_once_s = 0.0
        self._logged_s: float | None = None
        self._bar: tuple[Progress, TaskID] | None = None

    def start_at(self, done: int) -> None:
        """Start with steps that earlier processes have done, which do not count for the speed."""
        self._pace = Pace(done, self._clock(), self._steps_per_epoch)

    def update(
        self,
        done: float,
        *,
        steady_step_s: float | None = None,
        mean_step_s: float | None = None,
        waited_once_s: float = 0.0,
        once_left_s: float = 0.0,
    ) -> float:
        """Record that `done` steps are done, the last one perhaps in part; returns the expected seconds of the others.

        `steady_step_s` is the time of a step at the end of this interval, when one-off costs are over; `mean_step_s`
        is the mean of all its steps, without a pause before them. Neither includes waiting for what steps need only
        once, such as decoded images: all steps so far have waited `waited_once_s` for it, and in `once_left_s` all of
        it is there."""
        waited_s, self._waited_once_s = waited_once_s - self._waited_once_s, waited_once_s
        self._pace.once_left_s = once_left_s
        self._pace.update(done, self._clock() - waited_once_s, steady_step_s, mean_step_s, waited_s)
        return self._pace.seconds_for(self._total - done) or 0.0

    def show(self, done: int, figures: Mapping[str, str] | None = None) -> None:
        """Show that `done` steps are done; `figures` are shown after the step as 'box 0.0413  lr 9.2e-03'.

        A name that ends with an equals sign is shown without a space: 'loss=0.0413'.
        """
        now_s = self._clock()
        reached = max(done, self._pace.done)  # with the part of a step that was recorded
        left = self._pace.text(self._total - reached)
        texts = [
            f"{name}{'' if not name or name.endswith('=') else ' '}{value}" for name, value in (figures or {}).items()
        ]
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=reached, figures="  ".join([*texts, left]))
        elif self._logged_s is None or done >= self._total or now_s - self._logged_s >= self._every_s:
            self._logged_s = now_s
            logger.info("%s", step_line(self._title, done, self._total, texts, left))

    def advance(self, done: int, figures: Mapping[str, str] | None = None) -> None:
        """Record and show that `done` steps are done."""
        self.update(done)
        self.show(done, figures)

    def say(self, text: str) -> None:
        """Write a log line; above the bar if both are on the terminal."""
        if self._bar is not None and sys.stdout.isatty():
            self._bar[0].console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            logger.info("%s", text)

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._bar = _open_bar(
                self._stream, self._title, self._total, "{task.fields[figures]}", redirect_stdout=False, figures=""
            )
            self._bar[0].start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


class _Interval(NamedTuple):
    """Steps between two updates, with the pause before them."""

    seconds: float
    num_steps: float
    step_s: float


class Pace:
    """Estimates the time of the remaining steps, including regular pauses but not one-time costs.

    A typical step is the median over the steps of the latest intervals, of each interval the time of a step at its end:
    a short interval may differ, because the device catches up with the host in it. The first interval of a process
    includes its start, in which kernels are chosen, compiled and captured: it gives only an upper bound, unless
    the time of a step at its end is known.

    What else happens within an interval is a pause that recurs, unless it is much longer than all others, or in the
    last interval of an epoch: its short last batch may take long the first time, but never again. The pause between two
    epochs, mostly a validation, recurs. Until there was one, only a lower bound is known. The first one may be long
    because of what happens only once, so of one alone neither all nor nothing is extrapolated, but what makes an epoch
    the geometric mean of both: whatever it was, that is off by no more than a factor of two, if the pause is no longer
    than three times the steps of an epoch.

    Where steps wait for what they need only once, the device works meanwhile: how long it takes is hidden, and only a
    lower bound is known.
    """

    def __init__(self, done: float, now_s: float, steps_per_epoch: int = 0) -> None:
        """`steps_per_epoch` 0: there are no epochs."""
        self.done, self._now_s, self._steps_per_epoch = done, now_s, steps_per_epoch
        self._first_step_s: float | None = None
        self._latest: deque[_Interval] = deque()
        """The latest intervals; the first one of the process only if it is known how long its steps take."""
        self._pauses_s: list[float] = []
        """The time of each interval after the first that its steps do not explain."""
        self._between_s: list[float] = []
        """Pauses between epochs."""
        self._num_steps = 0.0
        self._is_hidden = False
        """Whether the last steps waited longer than they took."""
        self.once_left_s = 0.0
        """Seconds until what steps of this epoch need only once is there; the epoch takes at least as long."""

    def update(
        self,
        done: float,
        now_s: float,
        steady_step_s: float | None = None,
        mean_step_s: float | None = None,
        waited_s: float = 0.0,
    ) -> None:
        """`now_s` does not count the time `waited_s` for which these steps waited for what they need only once."""
        num_steps, seconds = done - self.done, max(0.0, now_s - self._now_s)
        if num_steps <= 0:
            return
        follows_epoch = self._is_end(self.done)
        self.done, self._now_s = done, now_s
        in_steps_s = seconds if mean_step_s is None else min(seconds, num_steps * mean_step_s)
        step_s = in_steps_s / num_steps if steady_step_s is None else min(steady_step_s, in_steps_s / num_steps)
        self._is_hidden = waited_s > num_steps * step_s
        if self._first_step_s is None or (self._is_hidden and not self._latest):
            self._first_step_s = step_s
            if not self._is_hidden and steady_step_s is not None:
                self._latest.append(_Interval(num_steps * step_s, num_steps, step_s))
            return
        if self._is_hidden:
            return
        self._latest.append(_Interval(seconds, num_steps, step_s))
        while len(self._latest) > _MIN_INTERVALS and sum(interval.seconds for interval in self._latest) > _WINDOW_S:
            self._latest.popleft()
        self._num_steps += num_steps
        if follows_epoch:
            self._between_s.append(seconds - in_steps_s)
            seconds = in_steps_s
        if not self._is_end(done):
            self._pauses_s.append(max(0.0, seconds - num_steps * self._step_s))

    @property
    def is_bound(self) -> bool:
        """Whether `seconds_for` is an upper bound rather than an estimate."""
        return not self._latest and not self._is_hidden

    @property
    def is_least(self) -> bool:
        """Whether `seconds_for` is a lower bound rather than an estimate."""
        if self._is_hidden:
            return True
        if not self._steps_per_epoch or self.is_bound or len(self._between_s) > 1:
            return False
        return not self._between_s or self._between_s[0] > _OUTLIER * self._epoch_s

    def text(self, num_steps: float) -> str:
        """The expected time of this many steps as text."""
        bound = "at most" if self.is_bound else "at least" if self.is_least else ""
        return eta_text(self.seconds_for(num_steps), bound)

    def seconds_for(self, num_steps: float) -> float | None:
        """The expected time of this many steps, with the pauses after epochs; None before the first interval."""
        if self._first_step_s is None:
            return None
        steps_s, left_of_epoch = max(0, num_steps) * self._per_step_s, num_steps
        if self._steps_per_epoch:
            left_of_epoch = min(num_steps, -self.done % self._steps_per_epoch)
        more_s = max(0.0, self.once_left_s - max(0, left_of_epoch) * self._per_step_s)
        return steps_s + self._num_ends(num_steps) * self._pause_s + more_s

    @property
    def _per_step_s(self) -> float:
        """A step, with its share of the pauses within epochs."""
        if not self._latest:
            return self._first_step_s or 0.0
        return self._step_s + self._paused_s / max(1, self._num_steps)

    @property
    def _epoch_s(self) -> float:
        """The steps of an epoch."""
        return self._steps_per_epoch * self._per_step_s

    @property
    def _pause_s(self) -> float:
        """The pause after an epoch."""
        if len(self._between_s) > 1:
            return median(self._between_s[1:][-_EPOCHS:])
        if self.is_least:
            return 0.0
        epoch_s = self._epoch_s
        return math.sqrt(epoch_s * (epoch_s + sum(self._between_s))) - epoch_s

    def _num_ends(self, num_steps: float) -> int:
        """The pauses after epochs that are still to come: the one that follows the steps so far, too."""
        if not self._steps_per_epoch:
            return 0
        return math.ceil(max(0, num_steps) / self._steps_per_epoch) + self._is_end(self.done)

    def _is_end(self, done: float) -> bool:
        """Whether so many steps are whole epochs."""
        return bool(self._steps_per_epoch and done) and done % self._steps_per_epoch == 0

    @property
    def _step_s(self) -> float:
        """The median, with as much weight for each interval as it has steps."""
        intervals = sorted(self._latest, key=lambda interval: interval.step_s)
        half, done = sum(interval.num_steps for interval in intervals) / 2, 0.0
        for interval, after in zip(intervals, [*intervals[1:], intervals[-1]], strict=True):
            done += interval.num_steps
            if done >= half:
                return (interval.step_s + after.step_s) / 2 if done == half else interval.step_s
        return intervals[-1].step_s

    @property
    def _paused_s(self) -> float:
        """Total time of pauses within epochs, without a one-time cost."""
        if not self._pauses_s:
            return 0.0
        *others, longest = sorted(self._pauses_s)
        is_one_time = longest > _OUTLIER * (others[-1] if others else 0.0)
        return sum(others) + (0.0 if is_one_time else longest)


def step_line(title: str, done: int, total: int, figures: list[str], left: str) -> str:
    """Progress as text, aligned from line to line: 'train  1200/5000   24 %  box 0.0413  lr 9.2e-03  10:26 left'."""
    width = len(str(total))
    head = f"{title}  {done:>{width}}/{total}  {100 * done / max(1, total):3.0f} %"
    return "  ".join([head, *figures, left])


def eta_text(seconds: float | None, bound: str = "") -> str:
    """The remaining time as text: '1:02:03 left', '10:26 left', 'at most 10:26 left'."""
    if seconds is None:
        return "just started"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    clock = f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{bound} {clock} left" if bound and seconds >= 1 else f"{clock} left"


def _open_bar(
    stream: TextIO, title: str, total: int, text: str, *more: "ProgressColumn", redirect_stdout: bool, **fields: Any
) -> "tuple[Progress, TaskID]":
    """A bar, followed by `text`, which shows the `fields` of its task, and more columns."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(text), *more)
    progress = Progress(*columns, console=Console(file=stream), transient=True, redirect_stdout=redirect_stdout)
    return progress, progress.add_task(title, total=total, **fields)
