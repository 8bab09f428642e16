"""Where does the host wait for the device? Count per code line, over a few steps that are not timed.

On a GPU, torch itself tells of every wait (`torch.cuda.set_sync_debug_mode`). Without one nothing waits, but the
same lines are visible: numbers read out of tensors one at a time (`.item()`, `float(t)`, `if t:`), which would each
be a wait on a GPU, and cost microseconds of Python anywhere.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from linecache import getline
from typing import Any, TextIO

from flatout.profiler.hooks import replaced
from flatout.profiler.measurement import WaitSite
from flatout.profiler.sampler import own_line, short_place

_READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
_WAIT_WARNING = "called a synchronizing CUDA operation"


class WaitCounter:
    """Waits per code line since it was made."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_steps = 0

    def sites(self) -> list[WaitSite]:
        """Most frequent first, per step."""
        steps = max(1, self.num_steps)
        return [
            WaitSite(where=short_place(where), per_step=count / steps, text=source_text(where))
            for where, count in self.counts.most_common()
        ]

    @contextmanager
    def counting(self) -> Iterator["WaitCounter"]:
        """Count inside the block; slows every wait down, so that steps inside it are not to be timed."""
        import torch

        how = _cuda_waits if torch.cuda.is_available() and torch.cuda.is_initialized() else _scalar_reads
        with how(self.counts):
            yield self


@contextmanager
def _cuda_waits(counts: Counter[str]) -> Iterator[None]:
    import torch

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if _WAIT_WARNING in str(message):
            counts[str(own_line(sys._getframe(1)))] += 1
        else:
            previous_show(message, category, filename, lineno, file, line)

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        previous_show, warnings.showwarning = warnings.showwarning, note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _scalar_reads(counts: Counter[str]) -> Iterator[None]:
    import torch

    with replaced(torch.Tensor, {name: _counted(getattr(torch.Tensor, name), counts) for name in _READS}):
        yield


def _counted(original: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def read(self: Any) -> Any:
        counts[str(own_line(sys._getframe(1)))] += 1
        return original(self)

    return read


def source_text(where: str) -> str:
    """The source line at file:line, without its indentation; empty if it cannot be found."""
    file, _, line = where.rpartition(":")
    return getline(file, int(line)).strip()
