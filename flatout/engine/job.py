"""Interfaces of the training loop: batches, job, schedule, the work after an epoch, and the numbers it reports."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from flatout.engine.graphs import Padding
from flatout.lazy import renamed


class Batches(Protocol):
    """A source of batches for any epoch, from any step on."""

    @property
    def device_wait_s(self) -> float:
        """Total seconds for which `next()` has waited for the device rather than for data."""

    @property
    def fill_wait_s(self) -> float:
        """Total seconds for which `next()` has waited for items that are read only once."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]: ...


class IntervalStats(NamedTuple):
    """Progress at a log interval. Items are means since the start of the epoch, times are means of this interval."""

    epoch: int
    step: int
    """Steps of this epoch that are done."""
    items: dict[str, float]
    lr: float
    step_ms: float
    wait_ms: float
    """The part of `step_ms` spent waiting for a batch."""
    samples_per_s: float
    steps_done: int = 0
    """Steps done in the whole training, by all processes."""
    steps_left: int = 0
    """Steps left in the whole training."""
    steady_ms: float = 0.0
    """Mean time of a full batch in the second half of this interval: without the one-off costs of a start, such as
    compiling kernels, capturing graphs and waiting for items that are read once, and without the short last batch of an
    epoch."""
    fill_wait_ms: float = 0.0
    """The part of `wait_ms` spent waiting for items that are read only once, at the start."""


class EpochReport(NamedTuple):
    """Losses, learning rates and times of a trained epoch."""

    items: dict[str, float]
    """Means over the steps of the epoch."""
    lrs: tuple[float, ...]
    seconds: float
    """Training time without validation, summed over all processes that worked on this epoch."""
    num_samples: int
    num_bad: int
    """Steps whose loss or gradients were not finite and which changed nothing."""
    step_ms: float = 0.0
    """Mean wall time of a step."""
    wait_ms: float = 0.0
    """The part of `step_ms` spent waiting for a batch."""

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / max(self.seconds, 1e-9)

    def timing(self) -> dict[str, float]:
        """Times and bad steps under their names in log.jsonl."""
        return {
            "seconds": round(self.seconds, 3),
            "images_per_s": self.samples_per_s,
            "step_ms": round(self.step_ms, 3),
            "wait_ms": round(self.wait_ms, 3),
            "bad_steps": self.num_bad,
        }


class Job(Protocol):
    """The computation of a training step."""

    @property
    def item_names(self) -> tuple[str, ...]:
        """Names of the numbers that a step reports."""

    @property
    def paddings(self) -> Mapping[str, Padding]:
        """How ragged inputs are padded for CUDA graphs, by name."""

    def phase(self, epoch: int) -> object:
        """A value that changes between epochs if and only if steps compute something else."""

    def inputs(self, batch: Any, epoch: int, step: int) -> dict[str, Tensor]:
        """The tensors of a step, on the device."""

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Forward and loss: a scalar to differentiate, and float32 [items] to report. Must not wait for the device."""


Sections = dict[str, Any]
"""The content of a checkpoint: "weights", "training" and "run"."""


class EpochEnd:
    """The work after an epoch, and what a checkpoint holds besides the loop's own tensors and position; none here."""

    def __call__(self, epoch: int, report: EpochReport, sections: Callable[[], Sections]) -> bool:
        """Validate and record; True ends the training, on all ranks. `sections` returns the whole training state, for
        jobs that keep a file per epoch.

        May raise Interrupted; it is then called again after the resume.
        """
        return False

    def sections(self) -> dict[str, dict[str, object]]:
        """The rest of a checkpoint besides tensors and position: "weights" (network structure), "run" and "job"."""
        return {"weights": {}, "run": {}, "job": {}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from the section "job"."""

    def flush(self) -> None:
        """Write files that belong to the checkpoint about to be saved, such as the best weights so far."""

    def between(self, epoch: int, step: int) -> Callable[[], None] | None:
        """Called after an optimizer step with the epoch and its steps done; returns work to do before the next step,
        such as a validation within an epoch, or None.

        All ranks must return alike, and the time of that work counts for no log interval.
        """
        return None


class StepSettings(NamedTuple):
    """Learning rates, momentum and accumulation of one step."""

    lrs: tuple[float, ...]
    """One per parameter group, in the optimizer's order."""
    momentum: float | None
    """None: keep the optimizer's own."""
    step_optimizer: bool
    """Whether the optimizer steps after this backward pass; otherwise gradients keep accumulating."""


Schedule = Callable[[int, int], StepSettings]
"""(epoch, step) -> the settings of the step, as a pure function: there is no state to save."""


__getattr__ = renamed(__name__, Tick="IntervalStats")
