"""What the terminal shows while training, and the decision about compiling that needs a measured step."""

import logging

import torch
from torch import nn

from flatout.engine.compiling import Compiled, compile_pays
from flatout.engine.job import Tick
from flatout.engine.loop import Loop
from flatout.engine.progress import StepProgress
from flatout.engine.spending import Spending

logger = logging.getLogger(__name__)

SETTLED_AFTER = 60
"""Steps in which kernels are chosen, compiled and captured: an interval that holds any of them says nothing."""
ENOUGH_INTERVALS = 2
"""Intervals after them; the quickest counts, since a single pause may be in any of them."""


class Teller:
    """Called at every log interval."""

    def __init__(self, loop: Loop, progress: StepProgress, spending: Spending, *, compile_auto: bool) -> None:
        self._loop, self._progress, self._spending = loop, progress, spending
        self._is_undecided = compile_auto
        self._steps_before = 0
        """Steps of this process when the interval under way began."""
        self._settled_ms: list[float] = []

    def __call__(self, tick: Tick) -> None:
        done = tick.epoch * self._loop.config.steps_per_epoch + tick.step
        left_s = tick.step_ms / 1e3 * self._loop.steps_left
        self._progress.advance(done, figures(tick) | self._spending.figures(left_s))
        if self._is_undecided and self._steps_before >= SETTLED_AFTER:
            self._settled_ms.append(tick.step_ms)
            if len(self._settled_ms) == ENOUGH_INTERVALS:
                self._is_undecided = False
                self._decide(min(self._settled_ms))
        self._steps_before = self._loop.steps_here

    def _decide(self, step_ms: float) -> None:
        network = self._loop.network
        layers = sum(isinstance(module, nn.Conv2d) for module in network.modules())
        decision = compile_pays(step_ms=step_ms, steps_left=self._loop.steps_left, num_layers=layers)
        logger.info("%s", decision.text)
        if decision.pays:
            self._loop.use_forward(Compiled(network))


def figures(tick: Tick) -> dict[str, str]:
    """Losses, speed and memory with their units, aligned from line to line."""
    shown = {"epoch": str(tick.epoch)} | {name: f"{value:.4f}" for name, value in tick.items.items() if name != "total"}
    shown |= {"lr": f"{tick.lr:.1e}", "step": f"{tick.step_ms:.1f} ms", "wait": f"{tick.wait_ms:.1f} ms"}
    shown |= {"speed": f"{tick.samples_per_s:.0f} img/s"}
    if torch.cuda.is_available():
        shown |= {"memory": f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"}
    return shown
