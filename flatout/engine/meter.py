"""Numbers of steps and epochs: copied from the device many steps at a time, averaged, and checked for divergence.

    step --row--> DeviceRows, buffer A | B --one copy per interval--> host, an interval later --> Meter, DivergenceGuard

Dimension key:  N steps of an interval   K numbers of a step
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.engine.job import EpochReport, IntervalStats

# Means

MIN_STEADY = 4
"""Fewest full batches before a short one from which the time of a step is estimated."""


@dataclass
class _EpochSums:
    """Sums over the steps of an epoch so far, under their names in checkpoints."""

    num_good: int = 0
    num_bad: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    num_steps: int = 0


class Meter:
    """Sums of the numbers of an epoch's steps. Steps are added one by one, so that means do not depend on where the
    training was interrupted."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.lrs: tuple[float, ...] = ()
        self._speed = (0.0, 0.0, 0.0)
        self._fill_wait_ms = 0.0
        self._steady_ms = 0.0
        self._most_samples = 0
        """Samples of a full batch."""
        self.begin_epoch()
        self.begin_interval()

    def begin_epoch(self) -> None:
        self._sum_K = np.zeros(len(self._names))
        self._epoch = _EpochSums()

    def begin_interval(self) -> None:
        self._began = time.perf_counter()
        self._samples = 0
        self._waited = self._waited_once = 0.0
        self._steps: list[tuple[float, int]] = []
        """When each step ended, by a clock that stands still while a step waits for what is read only once, and its
        samples."""

    def waited(self, seconds: float, *, once: float = 0.0) -> None:
        """Count time spent waiting for a batch, of which `once` was spent on items that are read only once."""
        self._waited_once += once
        self._waited += seconds
        self._epoch.waited_s += seconds

    def count(self, num_samples: int) -> None:
        """Count a step whose work has been queued on the device."""
        self._steps.append((time.perf_counter() - self._waited_once, num_samples))
        self._most_samples = max(self._most_samples, num_samples)
        self._epoch.num_steps += 1
        self._samples += num_samples
        self._epoch.num_samples += num_samples

    def add(self, items_NK: np.ndarray, bad_N: np.ndarray) -> None:
        """Add the numbers of N steps; bad ones are only counted."""
        for items_K in items_NK[~bad_N]:
            self._sum_K += items_K
        self._epoch.num_good += int((~bad_N).sum())
        self._epoch.num_bad += int(bad_N.sum())

    def means(self) -> dict[str, float]:
        return dict(zip(self._names, (self._sum_K / max(1, self._epoch.num_good)).tolist(), strict=True))

    def end_interval(self, epoch: int, step: int, *, steps_done: int, steps_left: int) -> IntervalStats:
        """Statistics of the interval that ends here; one without steps repeats the speed of the interval before."""
        now = time.perf_counter()
        seconds = max(now - self._began, 1e-9)
        self._epoch.seconds += seconds
        if steps := self._steps:
            per_step_ms = 1e3 / len(steps)
            self._speed = (seconds * per_step_ms, self._waited * per_step_ms, self._samples / seconds)
            self._fill_wait_ms = self._waited_once * per_step_ms
            self._steady_ms = self._steady(now - self._waited_once) or self._steady_ms or self._speed[0]
        self.begin_interval()
        lr = self.lrs[0] if self.lrs else 0.0
        return IntervalStats(
            epoch, step, self.means(), lr, *self._speed, steps_done, steps_left, self._steady_ms, self._fill_wait_ms
        )

    def _steady(self, now: float) -> float:
        """Mean time of the full batches in the second half of the interval, in milliseconds; 0: there are none.

        The short last batch of an epoch may cost more than any other step, once. With it the time is lost that the
        device needs for the two or three steps by which the host is ahead, so a few other steps are needed.
        """
        steps, first = self._steps, len(self._steps) // 2
        if steps[-1][1] == self._most_samples:
            end, num = now, len(steps) - first
        elif len(steps) == 1:
            return 0.0
        else:
            first = first if len(steps) - 1 - first >= MIN_STEADY else 0
            end, num = steps[-2][0], len(steps) - 1 - first
        return 1e3 * (end - (steps[first - 1][0] if first else self._began)) / num

    def report(self) -> EpochReport:
        per_step_ms = 1e3 / max(1, self._epoch.num_steps)
        return EpochReport(
            self.means(),
            self.lrs,
            self._epoch.seconds,
            self._epoch.num_samples,
            self._epoch.num_bad,
            step_ms=self._epoch.seconds * per_step_ms,
            wait_ms=self._epoch.waited_s * per_step_ms,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sum_K.tolist(), **vars(self._epoch), "lrs": list(self.lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum_K, self.lrs = np.array(state["sums"]), tuple(state["lrs"])
        self._epoch = _EpochSums(**{name: state[name] for name in vars(_EpochSums())})
        self.begin_interval()


# Numbers on the device


class DeviceRows:
    """Collects one row of K numbers per step on the device; only `drain` waits for it."""

    def __init__(
        self, num_columns: int, capacity: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self._device = device
        self._on_device = [torch.zeros(capacity, num_columns, dtype=dtype, device=device) for _ in range(2)]
        pinned = device.type == "cuda"
        self._on_host = [torch.zeros(capacity, num_columns, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._counts = [0, 0]
        self._side = 0
        """The buffer that is being filled."""

    def put(self, row_K: Tensor) -> None:
        """Append the numbers of a step; at most `capacity` rows between two swaps."""
        self._on_device[self._side][self._counts[self._side]].copy_(row_K)
        self._counts[self._side] += 1

    def swap(self) -> np.ndarray:
        """Swap the buffers and start copying the filled one to the host; returns the rows of the swap before, [N, K],
        as a copy."""
        earlier = self._read(1 - self._side)
        self._begin_copy(self._side)
        self._side = 1 - self._side
        return earlier

    def drain(self) -> np.ndarray:
        """All rows that were not returned yet, in order; waits for the device."""
        return np.concatenate((self.swap(), self.swap()))

    def _begin_copy(self, side: int) -> None:
        count = self._counts[side]
        self._on_host[side][:count].copy_(self._on_device[side][:count], non_blocking=True)
        if self._device.type == "cuda":
            self._copied[side] = torch.cuda.Event()
            self._copied[side].record()  # type: ignore[union-attr]

    def _read(self, side: int) -> np.ndarray:
        if (event := self._copied[side]) is not None:
            event.synchronize()  # recorded an interval ago, so it has usually happened
        rows_NK = self._on_host[side][: self._counts[side]].numpy().copy()
        self._counts[side] = 0
        return rows_NK


# Divergence
#
# A single step that is not finite is skipped and has no consequences. Several in a row mean that the weights are ruined
# and only an earlier checkpoint can help. If going back does not help either, the data has to be checked by a person.

MAX_BAD_STEPS = 3
"""Consecutive bad steps at which a training counts as diverged."""
MAX_BAD_STEPS_FP16 = 40
"""The same for bad gradients in float16, where the loss scale may be the cause: it is halved each time, from 65536 to
far below 1."""
MAX_ROLLBACKS = 2
MAX_SHOWN = 3
"""Samples named per step in a message."""


class TrainedStep(NamedTuple):
    """The position of a step and the samples it was trained on."""

    epoch: int
    step: int
    indices: np.ndarray
    ends_window: bool
    """Whether the optimizer stepped after it, so that its gradients were checked."""


class DivergenceGuard:
    """Decides whether a training has diverged, from the flags of its steps in order; touches no tensors or files."""

    def __init__(self, sample_name: Callable[[int], str] = str) -> None:
        """`sample_name` says where a sample comes from, such as the path of its image."""
        self._sample_name = sample_name
        self._pending: deque[TrainedStep] = deque()
        self._bad: deque[TrainedStep] = deque(maxlen=MAX_BAD_STEPS)
        self._bad_losses = 0
        self._bad_gradients = 0
        self._rollbacks = 0
        self._streak: TrainedStep | None = None
        self.first_bad: TrainedStep | None = None
        """The first of the bad steps at which the training last counted as diverged; None if it never did."""

    def add_step(self, epoch: int, step: int, indices: np.ndarray, *, ends_window: bool = True) -> None:
        """Add a step that was queued; its flags come later."""
        # Copied, because a batch is a view of a slot, which is refilled before the flags arrive.
        self._pending.append(TrainedStep(epoch, step, indices.copy(), ends_window))

    def has_diverged(self, bad_loss_N: np.ndarray, bad_gradient_N: np.ndarray, *, scaled: bool) -> bool:
        """Take the flags of the next N steps; True if too many bad ones follow each other. `scaled`: float16."""
        diverged = False
        for bad_loss, bad_gradient in zip(bad_loss_N.tolist(), bad_gradient_N.tolist(), strict=True):
            trained = self._pending.popleft()
            if bad_loss or bad_gradient:
                self._bad.append(trained)
            self._bad_losses = self._bad_losses + 1 if bad_loss else 0
            # Inside an accumulation window gradients are not checked, which does not mean that they are finite.
            if trained.ends_window:
                self._bad_gradients = self._bad_gradients + 1 if bad_gradient else 0
            self._streak = (self._streak or trained) if self._bad_losses or self._bad_gradients else None
            max_gradients = MAX_BAD_STEPS_FP16 if scaled else MAX_BAD_STEPS
            if not diverged and (self._bad_losses >= MAX_BAD_STEPS or self._bad_gradients >= max_gradients):
                diverged, self.first_bad = True, self._streak
        return diverged

    def roll_back(self, to: tuple[int, int] | None = None) -> bool:
        """Count a return to the checkpoint before the step `to`; False if there were too many."""
        self._rollbacks += 1
        self._pending.clear()
        self._bad_losses = self._bad_gradients = 0
        # A checkpoint that was saved among bad steps, which change no weight: what follows belongs to them.
        first = self.first_bad
        self._streak = first if first is not None and to is not None and to > (first.epoch, first.step) else None
        return self._rollbacks <= MAX_ROLLBACKS

    def description(self) -> str:
        """What happened, with samples of the last bad steps, as a sentence."""
        steps = "; ".join(
            f"epoch {bad.epoch} step {bad.step}: samples {', '.join(self._names(bad)[:MAX_SHOWN])}"
            f"{', ...' if len(bad.indices) > MAX_SHOWN else ''}"
            for bad in self._bad
        )
        return f"Loss, gradients or weights are not finite ({steps or 'no single bad step'})."

    def bad_samples(self) -> list[dict[str, object]]:
        """All samples of the first and of the last bad steps, for a JSON file."""
        first = [self.first_bad] if self.first_bad is not None else []
        steps = {(bad.epoch, bad.step): bad for bad in (*first, *self._bad)}
        return [
            {"epoch": bad.epoch, "step": bad.step, "samples": bad.indices.tolist(), "names": self._names(bad)}
            for _, bad in sorted(steps.items())
        ]

    def _names(self, step: TrainedStep) -> list[str]:
        return [self._sample_name(index) for index in step.indices.tolist()]
