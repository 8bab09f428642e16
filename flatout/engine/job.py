"""What the loop asks of those it works for, and what it tells them.

What a schedule says about one iteration: a pure function of where the training stands.

No state means nothing to save: a resumed run asks for the same iteration and gets the same answer.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from flatout.engine.graphs import Padding
from flatout.lazy import renamed


class Batches(Protocol):
    """Where batches come from; the loop says of which epoch, and from which step on."""

    @property
    def device_wait_s(self) -> float:
        """Seconds so far for which `next()` waited for the device, not for data."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]: ...


class IntervalStats(NamedTuple):
    """Progress at a log interval; items are means since the epoch began, times are since the last tick."""

    epoch: int
    step: int
    """Steps of this epoch that are done."""
    items: dict[str, float]
    lr: float
    step_ms: float
    wait_ms: float
    """Of `step_ms`, spent waiting for a batch."""
    samples_per_s: float
    steps_done: int = 0
    """Of the whole training, by whichever process."""
    steps_left: int = 0


class EpochReport(NamedTuple):
    """What an epoch of training came to."""

    items: dict[str, float]
    """Means over the epoch's steps."""
    lrs: tuple[float, ...]
    seconds: float
    """Of training, without validation; of all processes that worked on this epoch."""
    num_samples: int
    num_bad: int
    """Steps whose loss or gradients were not finite, and which changed nothing."""
    step_ms: float = 0.0
    """Of wall time, on average."""
    wait_ms: float = 0.0
    """Of `step_ms`, spent waiting for a batch."""

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / max(self.seconds, 1e-9)

    def timing(self) -> dict[str, float]:
        """For log.jsonl."""
        return {
            "seconds": round(self.seconds, 3),
            "images_per_s": self.samples_per_s,
            "step_ms": round(self.step_ms, 3),
            "wait_ms": round(self.wait_ms, 3),
            "bad_steps": self.num_bad,
        }


class Job(Protocol):
    """What a step computes."""

    @property
    def item_names(self) -> tuple[str, ...]:
        """Of the numbers that a step reports."""

    @property
    def paddings(self) -> Mapping[str, Padding]:
        """Ragged inputs, for CUDA graphs."""

    def phase(self, epoch: int) -> object:
        """Anything that compares unequal once steps begin to compute something else."""

    def inputs(self, batch: Any, epoch: int, step: int) -> dict[str, Tensor]:
        """Tensors of a step, on the device."""

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Forward and loss: a scalar to differentiate, and float32 [items] to report. Must not wait for the device."""


Sections = dict[str, Any]
"""A saved state: "weights", "training" and "run"."""


class EpochEnd(Protocol):
    """What happens after an epoch, and what is saved beside the loop's own tensors and position."""

    def __call__(self, epoch: int, report: EpochReport, sections: Callable[[], Sections]) -> bool:
        """Validate and record; True ends the training, on all ranks. `sections` gives the whole state, for files of an
        epoch's own.

        May raise Interrupted: it is called again after the resume.
        """

    def sections(self) -> dict[str, dict[str, object]]:
        """What a saved file says beside tensors and position: "weights" (how the network is built), "run", "job"."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the section "job"."""

    def flush(self) -> None:
        """Write what is due beside the checkpoint that was just saved, such as the best weights so far."""


class NoEpochEnd:
    """For a loop whose epochs are neither validated nor recorded."""

    def __call__(self, epoch: int, report: EpochReport, sections: Callable[[], Sections]) -> bool:
        return False

    def sections(self) -> dict[str, dict[str, object]]:
        return {"weights": {}, "run": {}, "job": {}}

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def flush(self) -> None: ...


class StepSettings(NamedTuple):
    """The settings of one iteration."""

    lrs: tuple[float, ...]
    """One per parameter group, in the optimizer's order."""
    momentum: float | None
    """None: leave the optimizer's own alone."""
    steps: bool
    """Does the optimizer step after this iteration's backward, or does the gradient go on growing?"""


class Schedule(Protocol):
    """StepSettings of the iteration `epoch * steps_per_epoch + step`; pure."""

    def __call__(self, epoch: int, step: int) -> StepSettings: ...


__getattr__ = renamed(__name__, Tick="IntervalStats")
