"""Means over an epoch, and times since the last look."""

import time
from typing import Any

import numpy as np

from flatout.engine.job import EpochReport, Tick


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

    def tick(self, epoch: int, step: int) -> Tick:
        """The interval since the last tick, which ends here; one without steps has the speed of the one before."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        self._seconds += seconds
        if self._steps:
            per_step_ms = 1e3 / self._steps
            self._speed = (seconds * per_step_ms, self._waited * per_step_ms, self._samples / seconds)
        self.begin_interval()
        return Tick(epoch, step, self.means(), self.lrs[0] if self.lrs else 0.0, *self._speed)

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
