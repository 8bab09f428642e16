"""When is a training lost? Decided from flags of past steps; nothing here touches tensors or files.

One step that is not finite is left out and forgotten. Several in a row mean that the weights are ruined, and that only
an earlier state can help. If that does not help either, somebody has to look at the data.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

PATIENCE = 3
"""Bad steps in a row that are taken for bad luck, one less."""
PATIENCE_WITH_SCALE = 40
"""The same while float16's loss scale may be the cause: it is halved each time, from 65536 to far below 1."""
MAX_ROLLBACKS = 2
SHOWN = 8


class TrainedStep(NamedTuple):
    """Which samples a step saw."""

    epoch: int
    step: int
    indices: np.ndarray
    ends_window: bool
    """Whether the optimizer stepped after it, and so looked at the gradients."""


class Guard:
    """Watches flags, in the order of the steps they belong to."""

    def __init__(self) -> None:
        self._pending: deque[TrainedStep] = deque()
        self._bad: deque[TrainedStep] = deque(maxlen=PATIENCE)
        self._bad_losses = 0
        self._bad_gradients = 0
        self._rollbacks = 0

    def remember(self, epoch: int, step: int, indices: np.ndarray, *, ends_window: bool = True) -> None:
        """A step was queued; its flags come later."""
        # A batch is a borrowed view: by then it would show other samples.
        self._pending.append(TrainedStep(epoch, step, indices.copy(), ends_window))

    def is_lost(self, bad_loss_N: np.ndarray, bad_gradient_N: np.ndarray, *, scaled: bool) -> bool:
        """Take the flags of the next N steps; True if a run of bad ones is too long."""
        lost = False
        for bad_loss, bad_gradient in zip(bad_loss_N.tolist(), bad_gradient_N.tolist(), strict=True):
            trained = self._pending.popleft()
            if bad_loss or bad_gradient:
                self._bad.append(trained)
            self._bad_losses = self._bad_losses + 1 if bad_loss else 0
            # Inside an accumulation window nobody has looked, which does not mean that gradients are fine.
            if trained.ends_window:
                self._bad_gradients = self._bad_gradients + 1 if bad_gradient else 0
            patience = PATIENCE_WITH_SCALE if scaled else PATIENCE
            lost = lost or self._bad_losses >= PATIENCE or self._bad_gradients >= patience
        return lost

    def roll_back(self) -> bool:
        """Count a return to an earlier state; False if there were too many."""
        self._rollbacks += 1
        self._pending.clear()
        self._bad_losses = self._bad_gradients = 0
        return self._rollbacks <= MAX_ROLLBACKS

    def complaint(self) -> str:
        """What happened, with the samples of the last bad steps."""
        steps = "; ".join(
            f"epoch {bad.epoch} step {bad.step}: samples {', '.join(map(str, bad.indices[:SHOWN].tolist()))}"
            f"{', ...' if len(bad.indices) > SHOWN else ''}"
            for bad in self._bad
        )
        return f"Loss, gradients or weights are not finite ({steps or 'no single step to blame'})."

    def bad_samples(self) -> list[dict[str, object]]:
        """The same for a file: every sample of the last bad steps."""
        return [{"epoch": bad.epoch, "step": bad.step, "samples": bad.indices.tolist()} for bad in self._bad]
