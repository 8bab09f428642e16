"""What the terminal shows while training, with an honest `data_time`: how long the step was blocked for data."""

import logging

import torch

from flatout.engine.job import Tick
from flatout.engine.progress import StepProgress
from flatout.spike.loader_plan import hint

logger = logging.getLogger(__name__)


class Teller:
    """What the terminal shows while training."""

    def __init__(self, progress: StepProgress, steps_per_epoch: int) -> None:
        self._progress, self._steps_per_epoch = progress, steps_per_epoch
        self._has_hinted = False

    def __call__(self, tick: Tick) -> None:
        done = tick.epoch * self._steps_per_epoch + tick.step
        self._progress.advance(done, figures(tick))
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
