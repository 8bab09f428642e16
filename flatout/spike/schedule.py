"""Steps and learning rates of a spike training: pure functions of the position.

A *micro-batch* is what one forward sees; an optimizer step follows every `accumulation` of them. Micro-batches that do
not fill a step at the end of an epoch are not trained, so no gradient leaks into the next epoch.
"""

import math
from typing import NamedTuple

from flatout.engine import Knobs
from flatout.errors import ConfigError

FIRST_SHARE = 0.001
"""Of the learning rate, at the first step of a warm-up."""


class StepPlan(NamedTuple):
    """How an epoch divides into steps."""

    samples_per_rank: int
    micro_batches: int
    """Per rank and epoch, the left-over ones included."""
    steps_per_epoch: int
    """Optimizer steps."""
    leftover: int
    accumulation: int
    samples_per_step: int
    """Over all ranks."""

    @property
    def trained_micro_batches(self) -> int:
        return self.steps_per_epoch * self.accumulation

    def epochs_for(self, total_steps: int) -> int:
        """Whole epochs that hold at least so many optimizer steps."""
        return -(-total_steps // self.steps_per_epoch)


def plan_steps(samples: int, *, world: int, batch: int, accumulation: int) -> StepPlan:
    """Divide an epoch; ConfigError if it has no whole step."""
    per_rank = samples // world
    micro = per_rank // batch
    steps = micro // accumulation
    if steps == 0:
        raise ConfigError(
            f"{samples} training clips make no whole step of {world} GPUs x BATCH_SIZE {batch} x "
            f"GRADIENT_ACCUMULATION_STEPS {accumulation}. Use smaller numbers, or more data."
        )
    return StepPlan(per_rank, micro, steps, micro - steps * accumulation, accumulation, world * batch * accumulation)


def learning_rate(base: float, step: int, *, warmup: int, total: int) -> float:
    """After `step` finished optimizer steps."""
    if not 0 < warmup < total:
        warmup = 0
    if step < warmup:
        return base * (FIRST_SHARE + (1 - FIRST_SHARE) * step / warmup)
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


class SpikeSchedule:
    """Knobs of a micro-batch. Pure: it does not matter where a run began."""

    def __init__(self, base: float, *, plan: StepPlan, epochs: int, warmup: int) -> None:
        self._base, self._plan, self._warmup = base, plan, warmup
        self._total = epochs * plan.steps_per_epoch

    def __call__(self, epoch: int, step: int) -> Knobs:
        accumulation = self._plan.accumulation
        done = epoch * self._plan.steps_per_epoch + step // accumulation
        rate = learning_rate(self._base, done, warmup=self._warmup, total=self._total)
        return Knobs(lrs=(rate, rate), momentum=None, steps=(step + 1) % accumulation == 0)
