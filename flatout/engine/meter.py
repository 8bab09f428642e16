"""Numbers of steps and epochs: fetched from the device many steps at a time, made into means, judged for divergence."""

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.engine.job import EpochReport, IntervalStats


class Meter:
    """Sums of an epoch's steps. They are added one after the other, so that a mean does not depend on where a
    training was interrupted."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.lrs: tuple[float, ...] = ()
        self._speed = (0.0, 0.0, 0.0)
        self.begin_epoch()
        self.begin_interval()

    def begin_epoch(self) -> None:
        self._sum_K = np.zeros(len(self._names))
        self._num_good = self._num_bad = self._num_samples = 0
        self._seconds = self._waited_s = 0.0
        self._num_steps = 0

    def begin_interval(self) -> None:
        self._began = time.perf_counter()
        self._steps = self._samples = 0
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        self._waited += seconds
        self._waited_s += seconds

    def count(self, num_samples: int) -> None:
        """A step was queued."""
        self._steps += 1
        self._num_steps += 1
        self._samples += num_samples
        self._num_samples += num_samples

    def add(self, items_NK: np.ndarray, bad_N: np.ndarray) -> None:
        """The numbers of N steps have arrived."""
        for items_K in items_NK[~bad_N]:
            self._sum_K += items_K
        self._num_good += int((~bad_N).sum())
        self._num_bad += int(bad_N.sum())

    def means(self) -> dict[str, float]:
        return dict(zip(self._names, (self._sum_K / max(1, self._num_good)).tolist(), strict=True))

    def tick(self, epoch: int, step: int, *, steps_done: int, steps_left: int) -> IntervalStats:
        """The interval since the last tick, which ends here; one without steps has the speed of the one before."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        self._seconds += seconds
        if self._steps:
            per_step_ms = 1e3 / self._steps
            self._speed = (seconds * per_step_ms, self._waited * per_step_ms, self._samples / seconds)
        self.begin_interval()
        lr = self.lrs[0] if self.lrs else 0.0
        return IntervalStats(epoch, step, self.means(), lr, *self._speed, steps_done, steps_left)

    def report(self) -> EpochReport:
        per_step_ms = 1e3 / max(1, self._num_steps)
        return EpochReport(
            self.means(),
            self.lrs,
            self._seconds,
            self._num_samples,
            self._num_bad,
            step_ms=self._seconds * per_step_ms,
            wait_ms=self._waited_s * per_step_ms,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": self._sum_K.tolist(),
            "num_good": self._num_good,
            "num_bad": self._num_bad,
            "num_samples": self._num_samples,
            "seconds": self._seconds,
            "waited_s": self._waited_s,
            "num_steps": self._num_steps,
            "lrs": list(self.lrs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum_K = np.array(state["sums"])
        self._num_good, self._num_bad = state["num_good"], state["num_bad"]
        self._num_samples, self._seconds = state["num_samples"], state["seconds"]
        self._waited_s, self._num_steps = state["waited_s"], state["num_steps"]
        self.lrs = tuple(state["lrs"])
        self.begin_interval()


# Numbers of every step, written on the device and fetched many steps at a time.
#
#     step --row--> buffer A | B --one copy per interval--> host, read an interval later
#
# Dimension key:  N steps of an interval   K numbers of a step


class StepLog:
    """Collects one row of K numbers per step, the last of them a flag; nobody waits for the device but `drain`."""

    def __init__(self, num_columns: int, capacity: int, device: torch.device) -> None:
        self._device = device
        self._on_device = [torch.zeros(capacity, num_columns, device=device) for _ in range(2)]
        self._on_host = [self._host_rows(capacity, num_columns) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._counts = [0, 0]
        self._turn = 0

    def put(self, row_K: Tensor) -> None:
        """Keep the first K - 1 numbers of a step; at most `capacity` between two calls of `turn`."""
        row = self._on_device[self._turn][self._counts[self._turn]]
        row[:-1].copy_(row_K)
        row[-1].zero_()
        self._counts[self._turn] += 1

    def mark(self, flag: Tensor) -> None:
        """Set the last column of the row that was put last."""
        self._on_device[self._turn][self._counts[self._turn] - 1, -1].copy_(flag)

    def turn(self) -> np.ndarray:
        """Begin the copy of what came since the last turn; returns what came before that, float64 [N, K]."""
        earlier = self._read(1 - self._turn)
        self._begin_copy(self._turn)
        self._turn = 1 - self._turn
        return earlier

    def drain(self) -> np.ndarray:
        """Everything that was put and not yet returned, in order; waits for the device."""
        return np.concatenate((self.turn(), self.turn()))

    def _begin_copy(self, side: int) -> None:
        count = self._counts[side]
        self._on_host[side][:count].copy_(self._on_device[side][:count], non_blocking=True)
        if self._device.type == "cuda":
            self._copied[side] = torch.cuda.Event()
            self._copied[side].record()  # type: ignore[union-attr]

    def _read(self, side: int) -> np.ndarray:
        if (event := self._copied[side]) is not None:
            event.synchronize()  # recorded an interval ago: long past
        rows_NK = self._on_host[side][: self._counts[side]].numpy().astype(np.float64)
        self._counts[side] = 0
        return rows_NK

    def _host_rows(self, capacity: int, num_columns: int) -> Tensor:
        return torch.zeros(capacity, num_columns, pin_memory=self._device.type == "cuda")


# When is a training lost? Decided from flags of past steps; nothing here touches tensors or files.
#
# One step that is not finite is left out and forgotten. Several in a row mean that the weights are ruined, and that
# only an earlier state can help. If that does not help either, somebody has to look at the data.

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
