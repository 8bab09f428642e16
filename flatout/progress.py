"""How far is a long piece of work, and when will it be done? A bar on a terminal, else a line now and then."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
