"""What the terminal shows while training, with an honest `data_time`: how long the step was blocked for data."""

import logging

import torch

from flatout.engine.job import Tick
from flatout.engine.loop import Loop
from flatout.engine.progress import StepProgress
from flatout.engine.spending import Spending
from flatout.spike.loader_plan import hint

logger = logging.getLogger(__name__)


class Teller:
    """What the terminal shows while training."""

    def __init__(self, loop: Loop, progress: StepProgress, spending: Spending) -> None:
        self._loop, self._progress, self._spending = loop, progress, spending
        self._has_hinted = False

    def __call__(self, tick: Tick) -> None:
        done = tick.epoch * self._loop.config.steps_per_epoch + tick.step
        left_s = tick.step_ms / 1e3 * self._loop.steps_left
        self._progress.advance(done, figures(tick) | self._spending.figures(left_s))
        # From the second epoch on: before, files come from the disk and kernels are chosen.
        if tick.epoch > 0 and not self._has_hinted:
            self._has_hinted = True
            logger.info("%s", hint(tick.wait_ms, tick.step_ms))


def figures(tick: Tick) -> dict[str, str]:
    """Losses, times with their units, and speed from wall time."""
    shown = {"epoch": str(tick.epoch), "loss": f"{tick.items['loss']:.4f}", "lr": f"{tick.lr:.1e}"}
    shown |= {"data_time": f"{tick.wait_ms:.1f} ms", "step": f"{tick.step_ms:.1f} ms"}
    shown |= {"": f"{tick.samples_per_s:.1f} samples/s"}
    if torch.cuda.is_available():
        shown |= {"GPU0_mem": f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB"}
    return shown
