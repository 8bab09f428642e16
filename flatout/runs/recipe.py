"""The interface between a job and a run: the job's `Recipe`, and the objects that are passed between them.

A run calls the methods of a recipe in this order, on every rank:

    identity, write_config      which training it is, before anything is opened
    open_data                   early, because data is the most frequent source of errors
    build                       network, optimizer, moving average: new, or as a checkpoint describes them
    open_batches, job           the input, and the computation of a step
    schedule                    learning rates and accumulation of every step
    validate, rows              after every epoch
    best_weights                whenever an epoch is the best so far
    final_weights, plot         once, when everything is trained

Everything else is up to the run: ranks, device, folder and lock, resume, callbacks, mirror, signals, progress, budget,
checkpoints. `docs/new-job.md` builds a complete job from this.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatout.cli import changes_of
from flatout.config import read_config
from flatout.engine import Amp, Batches, Callback, EpochReport, IntervalStats, Job, MovingAverage, Schedule, Sections
from flatout.errors import Interrupted
from flatout.feed import DeviceBatches, OpenPass
from flatout.ranks import Interrupts, World
from flatout.runs.background import Background
from flatout.runs.loggers.choose import choose_loggers
from flatout.runs.options import CONFIG_NAME, Identity, RunOptions, config_of, identity_of, plain
from flatout.safefiles import write_file
from flatout.yaml_strict import dump_yaml


@dataclass(frozen=True)
class Seams:
    """Hooks to observe a training, or to change its batches, without touching its code."""

    batches: Callable[[Batches], Batches] = lambda batches: batches
    """Wraps the batches that the loop takes."""
    open_pass: OpenPass | None = None
    """Opens the passes of the feed, before batches are copied to the device; None: the feed's own."""
    plots: bool = True
    """Whether plots are made: first batches, labels, results."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The environment of an open run, the same on all ranks except where noted."""

    world: World
    device: torch.device
    """The device of this rank."""
    folder: Path
    weights: Path
    """The folder of its weights and checkpoints."""
    continues: bool
    """Whether an existing run is continued."""
    interrupts: Interrupts
    stack: ExitStack
    """Closed when the training ends; for everything that a recipe opens."""
    plots: bool
    """Whether this rank makes plots."""
    background: Background = field(default_factory=Background)
    """Makes them while the training goes on; closed before callbacks are notified of its end."""

    def stop_if_asked(self) -> None:
        """Interrupted if a signal requests the end; to be called during long work between two steps.

        Does nothing with several ranks: those that received no signal would wait forever.
        """
        if self.world.size == 1 and self.interrupts.requested is not None:
            raise Interrupted.by(self.interrupts.requested)


class DataFacts(NamedTuple):
    """The identity of the training data, to detect changes."""

    fingerprint: str
    what: str
    """Subject of the message about changed data: 'my.yaml: images or labels'."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The objects that are trained."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    epochs: int
    first_epoch: int = 0
    average: MovingAverage | None = None

    @property
    def evaluated(self) -> nn.Module:
        """The network that is validated and saved: the moving average, if there is one."""
        return self.network if self.average is None else self.average.network

    def copied_state(self) -> dict[str, Tensor]:
        """A copy of the state of `evaluated`, so that training can continue."""
        return {key: tensor.detach().clone() for key, tensor in self.evaluated.state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """Precision, clipping and CUDA graphs of steps."""

    amp: Amp = "off"
    clip_norm: float | None = None
    graphs: bool = False


class ValidationResult(NamedTuple):
    """The scores of a validation."""

    score: float
    """The score by which epochs are compared; higher is better."""
    named: Mapping[str, float | None]
    """Scores by their column names in tables."""
    outcome: Any
    """The job's own result, for the caller of `train`."""
    text: str = ""
    """A log line; empty if the job has logged it itself."""


class EpochRecord(NamedTuple):
    """What is recorded of an epoch."""

    row: Mapping[str, object]
    """Row of results.csv and, with times added, of log.jsonl."""
    scalars: Mapping[str, float]
    """Values for charts, by tag."""
    line: str | None = None
    """Line of results.txt."""
    at: int | None = None
    """The x value for charts; None: the epoch."""


class Recipe(ABC):
    """The job's own part of a training. Created from options, before anything is opened."""

    name: ClassVar[str]
    """Name of the job: "yolo"."""
    weights_folder: ClassVar[str] = "weights"
    samples: ClassVar[str] = "img"
    """Unit of a sample in speeds: img/s."""
    saves: bool = True
    """False: nothing is saved before the end."""

    def __init__(self, options: RunOptions, world: World, device: torch.device, *, resume: Path | None = None) -> None:
        """`resume`: the run folder given by --resume."""
        self.options, self.world, self.device = options, world, device

    # Identity of the training

    @classmethod
    def read_options(cls, folder: Path, asked: RunOptions) -> RunOptions:
        """The stored options of a run that is resumed; `asked` are those of the command."""
        return read_config(folder / CONFIG_NAME, type(asked))

    def identity(self) -> Identity:
        """The settings by which it is decided whether a command continues a run."""
        return identity_of(self.options, config_of(self.options))

    @property
    @abstractmethod
    def seed(self) -> int:
        """Seed of the data stream and of the initial weights, the same on all ranks."""

    def write_config(self, folder: Path) -> None:
        """Write the options to the run folder, atomically; without those of class `call`."""
        write_options(folder / CONFIG_NAME, self.options)

    def loggers(self) -> list[Callback]:
        """The loggers of `--log-to`; ConfigError if a package is missing."""
        return choose_loggers(self.options.log_to)

    # Parts of the training

    @abstractmethod
    def open_data(self) -> DataFacts:
        """Find and check the samples. There is no run folder yet."""

    @abstractmethod
    def build(self, run: RunContext, saved: Sections | None) -> Model:
        """Create network and optimizer on the device. `saved` is the checkpoint to continue from; the run itself loads
        its tensors later.

        `run` stays valid until the end of the training.
        """

    @abstractmethod
    def open_batches(self, model: Model) -> DeviceBatches:
        """Open the input; what must be closed goes into the `stack` of the run."""

    @abstractmethod
    def job(self, model: Model) -> Job:
        """The computation of a step."""

    @abstractmethod
    def schedule(self, model: Model, steps_per_epoch: int) -> Schedule:
        """Learning rates, momentum and accumulation of every step."""

    def steps(self, batches: DeviceBatches) -> int:
        """Steps per epoch."""
        return len(batches)

    def compute_settings(self) -> ComputeSettings:
        """Precision, clipping and CUDA graphs of steps."""
        return ComputeSettings()

    def preflight(self, model: Model) -> Iterator[str]:
        """Remarks about resources of the machine, for one log line; shortages are logged as warnings."""
        return iter(())

    def num_kept_states(self, model: Model) -> int:
        """Number of checkpoints that are kept for good."""
        return 0

    def started(self, model: Model) -> None:
        """Called once, before the first step of a new training."""

    def histograms(self) -> Mapping[str, np.ndarray]:
        """Distributions of the training data, for charts."""
        return {}

    @property
    def is_long(self) -> bool:
        """Whether the training is long enough for cuDNN's benchmarking of kernels to pay."""
        return True

    # After an epoch

    validates: bool = False
    """Whether there is validation data; without it, the newest weights count as the best."""

    def plot_batches(self) -> None:
        """Submit plots of the first batches to the background of the run. May wait for the device."""

    def is_due(self, epoch: int, *, last: bool) -> bool:
        """Whether this epoch is validated; the same on all ranks."""
        return True

    def validate(self, model: Model, epoch: int, *, last: bool) -> ValidationResult | None:
        """Validate; called on all ranks, the result is needed on the first. May raise Interrupted on a signal."""
        return None

    def due_mid_epoch(self, epoch: int, step: int) -> int | None:
        """Steps of the training so far, if a validation within the epoch is due after `step`; the same on all ranks."""
        return None

    def mid_epoch_scalars(self, steps: int, found: ValidationResult) -> Mapping[str, float]:
        """Chart values of a validation within an epoch; called on the first rank."""
        return {}

    def rows(self, epoch: int, report: EpochReport, found: ValidationResult | None) -> EpochRecord:
        """What is recorded of an epoch; called on the first rank."""
        scores = dict(found.named) if found is not None else {}
        row: dict[str, object] = {"epoch": epoch, **report.items, "lr": report.lrs[0]}
        row |= {f"val_{name}" if name in row else name: value for name, value in scores.items()}
        scalars = {f"train/{name}": value for name, value in report.items.items()}
        scalars |= {"train/lr": report.lrs[0], "train/samples_per_s": report.samples_per_s}
        return EpochRecord(row, scalars | {f"val/{name}": value for name, value in scores.items() if value is not None})

    def after_epoch(
        self, model: Model, epoch: int, found: ValidationResult | None, sections: Callable[[], Sections], *, stops: bool
    ) -> None:
        """Called after an epoch is validated and recorded. `sections` returns the whole training state."""

    # Files

    @abstractmethod
    def describe_network(self, model: Model) -> dict[str, Any]:
        """The network's structure for weights files, without tensors."""

    def describe_checkpoint(self, epoch: int, best_score: float) -> dict[str, Any]:
        """Further entries about the weights in last.pt; `epoch` is the last completed one."""
        return {}

    def describe_run(self) -> dict[str, Any]:
        """Further entries of the section "run" of a checkpoint, besides config, data, environment and seed."""
        return {}

    hashed_inputs: Collection[str] | None = None
    """Names of the inputs of a step that are hashed if steps are recorded; None: all."""

    def input_facts(self) -> Mapping[str, Any] | None:
        """What is needed, besides the files of the run folder, to make the input of a step again, as JSON values; None:
        steps are not recorded (`step_record`). Called after `open_batches`; the answer may change between epochs, but
        not between None and facts."""
        return None

    def replay_command(self, folder: Path, epoch: int, step: int) -> str:
        """The command that shows what the network saw in a step of the run; empty: there is none."""
        return ""

    def state(self) -> dict[str, Any]:
        """State of the job that is kept between epochs and saved in checkpoints."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; keys that older versions did not save may be missing."""

    def best_weights(self, model: Model, epoch: int, found: ValidationResult | None) -> dict[str, Any]:
        """The content of best.pt besides `describe_network`; tensors are copied, so that training can continue."""
        score = None if found is None else found.score
        return {"kind": "model", "state": model.copied_state(), "epoch": epoch, "score": score}

    def best_names(self, epoch: int) -> Iterable[str]:
        """Names of the weights files to write if this epoch is the best so far."""
        return ("best.pt",)

    def final_weights(
        self, model: Model, epoch: int, found: ValidationResult | None, best_score: float
    ) -> dict[str, Any] | None:
        """The content of the final last.pt besides `describe_network`: only weights. None: it stays a checkpoint."""
        return self.best_weights(model, epoch, found)

    # Progress and plots

    def figures(self, stats: IntervalStats) -> dict[str, str]:
        """Losses, speed and memory with their units, for the progress line."""
        shown = {"epoch": str(stats.epoch)}
        shown |= {name: f"{value:.4f}" for name, value in stats.items.items() if name != "total"}
        shown |= {"lr": f"{stats.lr:.1e}", "step": f"{stats.step_ms:.1f} ms", "wait": f"{stats.wait_ms:.1f} ms"}
        shown |= {"speed": f"{stats.samples_per_s:.0f} {self.samples}/s"}
        if torch.cuda.is_available():
            shown |= {"memory": f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"}
        return shown

    def hint(self, stats: IntervalStats) -> None:
        """Called at every log interval; may log advice."""

    def plot(self, folder: Path) -> None:
        """Plot the results, in the background; errors only cause a warning."""

    def finished(self, folder: Path) -> None:
        """Called on the first rank once all files are on disk, before the last lines, which all jobs share."""


def write_options(path: Path, options: RunOptions, *, leave_out: Collection[str] = ()) -> None:
    """Write options that are set, except those of class `call` and those in `leave_out`."""
    changes = changes_of(type(options))
    kept = {key: value for key, value in plain(options).items() if changes.get(key) != "call" and key not in leave_out}
    write_yaml(path, {key: value for key, value in kept.items() if value is not None})


def write_yaml(path: Path, values: Mapping[str, Any]) -> None:
    write_file(path, dump_yaml(values))


@dataclass(frozen=True)
class RunResult:
    """The result of a training."""

    folder: Path
    outcome: Any
    """The job's own result of the last validation; None if there was none."""
    best_score: float
    finished: bool
    """False if it stopped early; the same command then continues."""
    why: str = ""
    """Why it stopped early."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Mean losses of the last epoch."""
