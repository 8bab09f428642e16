"""Host-device waits, counted per code line over a few steps that are not timed.

On a GPU, torch itself reports every wait (`torch.cuda.set_sync_debug_mode`). Without one nothing waits, but the same
lines can be found: numbers read out of tensors one at a time (`.item()`, `float(t)`, `if t:`), each of which would be a
wait on a GPU, and costs microseconds of Python anywhere.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

from flatout.clock import LOG
from flatout.profiler.measurement import WaitBetween, WaitSite
from flatout.profiler.observe.hooks import replaced
from flatout.profiler.observe.recorder import callers_of, is_library_code, relative_location, user_line

_READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
_OPTIMIZERS = str(Path("torch", "optim")) + os.sep
_WAIT_WARNING = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype feature"
"""torch's warning about this mode; not shown to users."""


class WaitCounter:
    """Counts waits per code line; those between steps are counted separately."""

    def __init__(self, pause_stage: Callable[[], str | None] = lambda: None) -> None:
        """`pause_stage` gives the current stage if it is not part of an ordinary step, None inside a step."""
        self.num_steps = 0
        self._stage_apart = pause_stage
        self._counts: Counter[tuple[str, str | None]] = Counter()
        self._steps_logged: set[int] = set()

    def sites(self) -> list[WaitSite]:
        """Waits per step inside steps, most frequent first."""
        counts: Counter[str] = Counter()
        for (where, stage), count in self._counts.items():
            if self._is_in_step(stage):
                counts[where] += count
        steps = max(1, self.num_steps)
        return [
            WaitSite(where=relative_location(where), per_step=count / steps, text=source_text(where))
            for where, count in counts.most_common()
        ]

    def between(self) -> list[WaitBetween]:
        """Waits between steps, most frequent first."""
        return [
            WaitBetween(where=relative_location(where), stage=stage, times=count, text=source_text(where))
            for (where, stage), count in self._counts.most_common()
            if stage is not None and not self._is_in_step(stage)
        ]

    def note(self, where: str) -> None:
        """Count one wait at file:line."""
        stage = self._stage_apart()
        self._counts[where, stage] += 1
        if stage == LOG:
            self._steps_logged.add(self.num_steps)

    def _is_in_step(self, stage: str | None) -> bool:
        """Whether a stage is part of a step; logging is, if it waits in every step."""
        return stage is None or (stage == LOG and len(self._steps_logged) >= max(1, self.num_steps))

    def counting(self) -> AbstractContextManager[None]:
        """Count waits inside the block. This slows every wait down, so steps inside it must not be timed."""
        import torch

        how = _cuda_waits if torch.cuda.is_available() and torch.cuda.is_initialized() else _scalar_reads
        return how(self.note)


@contextmanager
def _cuda_waits(note: Callable[[str], None]) -> Iterator[None]:
    import torch

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        if _WAIT_WARNING in str(message):
            note(str(user_line(sys._getframe(1))))
        elif _PROTOTYPE not in str(message):
            previous_show(message, *where, **more)

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        previous_show, warnings.showwarning = warnings.showwarning, show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _scalar_reads(note: Callable[[str], None]) -> AbstractContextManager[None]:
    import torch

    return replaced(torch.Tensor, {name: _noted(getattr(torch.Tensor, name), note) for name in _READS})


def _noted(original: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    def read(self: Any) -> Any:
        if not _is_in_optimizer(sys._getframe(1)):
            note(str(user_line(sys._getframe(1))))
        return original(self)

    return read


def _is_in_optimizer(frame: FrameType) -> bool:
    """Whether a torch optimizer does the reading: Adam's step counters, one per weight, are always in host memory."""
    files = (each.f_code.co_filename for each in callers_of(frame))
    return any(_OPTIMIZERS in file for file in takewhile(is_library_code, files))


def source_text(where: str) -> str:
    """The source line at file:line, without its indentation; empty if it cannot be found."""
    file, _, line = where.rpartition(":")
    return getline(file, int(line)).strip() if line.isdecimal() else ""
