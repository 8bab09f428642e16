"""Learning rates, momentum, accumulation and picture sizes of a YOLOv7 training, iteration by iteration.

    iteration  0 ............ num_warmup | rest of that epoch | each later epoch e
    lr         0 -> lr0 * f(epoch)       | as warm-up left it | lr0 * f(e - 1)

That a later epoch uses the factor of the one before it is a quirk of YOLOv7, kept because results depend on it.
"""

import math
from collections.abc import Callable

import numpy as np

from flatout.engine import Knobs
from flatout.feed import Purpose, keyed_uniform
from flatout.yolo.hyp import Hyp

NOMINAL_BATCH = 64
"""Gradients are gathered over iterations until about this many pictures have been seen."""
LEAST_WARMUP = 1000
"""Iterations. Short runs never leave it; the hyp key `warmup_iters` overrides it."""


def accumulate_for(total_batch: int) -> int:
    """Iterations per optimizer step, after warm-up."""
    return max(round(NOMINAL_BATCH / total_batch), 1)


def scaled_weight_decay(weight_decay: float, *, total_batch: int) -> float:
    """The decay of a step that sees `total_batch * accumulate_for(total_batch)` pictures instead of 64."""
    return weight_decay * (total_batch * accumulate_for(total_batch) / NOMINAL_BATCH)


def num_warmup_iterations(hyp: Hyp, *, steps_per_epoch: int) -> int:
    """Iterations 0 to this one, both included, are warm-up; 0: there is none."""
    if hyp.warmup_iters is not None:
        return hyp.warmup_iters
    return max(round(hyp.warmup_epochs * steps_per_epoch), LEAST_WARMUP)


def cosine(lrf: float, epochs: int) -> Callable[[int], float]:
    """Factor of the learning rate in an epoch, from 1 to `lrf` along half a wave."""
    return lambda epoch: (1 - math.cos(epoch * math.pi / epochs)) / 2 * (lrf - 1) + 1


def line(lrf: float, epochs: int) -> Callable[[int], float]:
    """Factor of the learning rate in an epoch, from 1 to `lrf` along a straight line."""
    last = max(epochs - 1, 1)
    return lambda epoch: (1 - epoch / last) * (1 - lrf) + lrf


class YoloSchedule:
    """Knobs for the three parameter groups of prepare.py. Pure: it does not matter where a run began.

    `epochs` is the length of the decay. Where a finished run is trained on, YOLOv7 keeps the length of the first
    training for the cosine, which then rises again, and takes the new total for the line.
    """

    def __init__(
        self, hyp: Hyp, *, epochs: int, steps_per_epoch: int, total_batch: int, linear: bool = False, adam: bool = False
    ) -> None:
        self._hyp = hyp
        self._steps_per_epoch = steps_per_epoch
        self._total_batch = total_batch
        self._adam = adam
        self._factor = (line if linear else cosine)(hyp.lrf, epochs)
        self.num_warmup = num_warmup_iterations(hyp, steps_per_epoch=steps_per_epoch)

    def __call__(self, epoch: int, step: int) -> Knobs:
        iteration = epoch * self._steps_per_epoch + step
        lr = self._hyp.lr0 * self._factor(self._epoch_of_factor(epoch, iteration))
        bias_lr, momentum = lr, self._hyp.momentum
        if iteration <= self.num_warmup:
            bias_lr = self._warm_up(iteration, self._hyp.warmup_bias_lr, lr)
            momentum = self._warm_up(iteration, self._hyp.warmup_momentum, momentum)
            lr = self._warm_up(iteration, 0.0, lr)
        return Knobs(
            lrs=(lr, lr, bias_lr),
            momentum=None if self._adam else momentum,
            steps=iteration % self.accumulate(iteration) == 0,
        )

    def accumulate(self, iteration: int) -> int:
        """Iterations per optimizer step; grows from 1 during warm-up."""
        wanted = self._warm_up(iteration, 1.0, NOMINAL_BATCH / self._total_batch)
        return max(round(wanted), 1)

    def _epoch_of_factor(self, epoch: int, iteration: int) -> int:
        """Warm-up aims at the factor of the epoch at hand, and the epoch in which it ends keeps it."""
        in_warmup = iteration <= self.num_warmup or epoch == self.num_warmup // self._steps_per_epoch
        return epoch if in_warmup else epoch - 1

    def _warm_up(self, iteration: int, start: float, end: float) -> float:
        """On the way from `start` at iteration 0 to `end` at the end of warm-up."""
        if iteration >= self.num_warmup:
            return end
        return (end - start) / self.num_warmup * iteration + start


# Another picture size for every batch: half to one and a half times the training size, in steps of the grid.


def sizes_from(image_size: int, grid: int) -> range:
    """Numbers a size is drawn from, all equally likely; `size_of_draw` rounds one to the grid."""
    return range(image_size // 2, image_size * 3 // 2 + grid)


def size_of_draw(draw: int, grid: int) -> int:
    """Longer side of the batch, in pixels."""
    return draw // grid * grid


def draw_size(image_size: int, grid: int, *, seed: int, epoch: int, step: int) -> int:
    """Longer side of one step's batch, a pure function of the step: resuming and ranks agree on it."""
    draws = sizes_from(image_size, grid)
    (uniform,) = keyed_uniform(seed, epoch, np.array([step]), 1, purpose=Purpose.STEP)[0]
    return size_of_draw(draws[int(uniform * len(draws))], grid)


def scaled_shape(height: int, width: int, *, size: int, grid: int) -> tuple[int, int]:
    """Height and width of a batch [height, width] whose longer side becomes `size`, each a multiple of the grid."""
    factor = size / max(height, width)
    if factor == 1:
        return height, width
    return math.ceil(height * factor / grid) * grid, math.ceil(width * factor / grid) * grid
