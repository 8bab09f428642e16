"""What a job hands to a run, and what it learns from it.

A run asks for the parts of a training in this order, on every rank:

    identity, write_config      which training is meant, before anything is opened
    open_data                   first, because it is what is most often wrong
    build                       network, optimizer, moving average: fresh, or as a saved state describes them
    open_batches, job           the input, and what a step computes
    schedule                    rates and accumulation, step by step
    validate, rows              after every epoch
    best_weights                whenever an epoch is the best so far
    final_weights, plot         once, when everything is trained

Everything else about a run is the run's: ranks, device, folder and lock, resume, callbacks, mirror, signals, progress,
budget, checkpoints. `docs/new-job.md` builds a whole job from this.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import yaml
from torch import nn

from flatout.cli import changes_of
from flatout.config import read_config
from flatout.engine import Amp, Batches, Callback, EpochReport, IntervalStats, Job, MovingAverage, Schedule, Sections
from flatout.errors import Interrupted
from flatout.feed import DeviceBatches, OpenPass
from flatout.ranks import Interrupts, World
from flatout.runs.loggers.choose import choose_loggers
from flatout.runs.options import Identity, RunOptions, config_of, identity_of, plain
from flatout.safefiles import replacing

CONFIG_NAME = "config.yaml"


@dataclass(frozen=True)
class Seams:
    """Where somebody may look at a training, or change what flows through it, without touching its code."""

    batches: Callable[[Batches], Batches] = lambda batches: batches
    """Wraps the batches that the loop takes."""
    open_pass: OpenPass | None = None
    """Opens the passes of the feed below the copy to the device; None: as ever."""
    plots: bool = True
    """Whether pictures for people are drawn: first batches, labels, results."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """A run that is open: where it trains, as every rank knows it."""

    world: World
    device: torch.device
    folder: Path
    continues: bool
    """Whether there is a state to go on from."""
    interrupts: Interrupts
    stack: ExitStack
    """Closed when the training ends: what a recipe opens goes in here."""
    plots: bool
    """Whether this rank draws pictures for people."""

    def stop_if_asked(self) -> None:
        """For what takes long between two steps: Interrupted if a signal asks for the end.

        Not with several ranks: those of them that heard no signal would wait for ever.
        """
        if self.world.size == 1 and self.interrupts.requested is not None:
            raise Interrupted.by(self.interrupts.requested)


class DataFacts(NamedTuple):
    """How data is told from changed data."""

    fingerprint: str
    what: str
    """'my.yaml: pictures or labels': said where they have changed."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    epochs: int
    first_epoch: int = 0
    average: MovingAverage | None = None

    @property
    def evaluated(self) -> nn.Module:
        """What is validated and kept: the moving average, where there is one."""
        return self.network if self.average is None else self.average.network


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """How steps are computed."""

    amp: Amp = "off"
    clip_norm: float | None = None
    graphs: bool = False


class ValidationResult(NamedTuple):
    """What a validation found."""

    score: float
    """The higher, the better: the best is kept."""
    named: Mapping[str, float | None]
    """Scores by the names that tables have."""
    outcome: Any
    """As the job knows it, for whoever called `train`."""
    text: str = ""
    """For the log; empty: the job has said it already."""


class EpochRecord(NamedTuple):
    """What is written down of an epoch."""

    row: Mapping[str, object]
    """Of results.csv, and with times of log.jsonl."""
    scalars: Mapping[str, float]
    """For charts, under the tags that they have."""
    line: str | None = None
    """Of results.txt."""
    at: int | None = None
    """What charts plot it over; None: the epoch."""


class Recipe(ABC):
    """A training, as far as it is its job's own. Made from options, before anything is opened."""

    name: ClassVar[str]
    """Of the job: "yolo"."""
    weights_folder: ClassVar[str] = "weights"
    samples: ClassVar[str] = "img"
    """What a batch holds, for the speed: img/s."""
    saves: bool = True
    """False: nothing is saved before the end."""

    def __init__(self, options: RunOptions, world: World, device: torch.device, *, resume: Path | None = None) -> None:
        """`resume`: the folder of the run that --resume names."""
        self.options, self.world, self.device = options, world, device

    # Which training is meant

    @classmethod
    def read_options(cls, folder: Path, asked: RunOptions) -> RunOptions:
        """Those of a run that is resumed, out of its folder; `asked` are those of the command."""
        return read_config(folder / CONFIG_NAME, type(asked))

    def identity(self) -> Identity:
        return identity_of(self.options, config_of(self.options))

    @property
    def place(self) -> tuple[Path, str]:
        """The folder of run folders, and the name of this one."""
        return Path(self.options.project), self.options.name

    @property
    @abstractmethod
    def seed(self) -> int:
        """Of the stream and of the network's first weights, the same on all ranks."""

    def write_config(self, folder: Path) -> None:
        """The options of the run in its folder, whole or not at all; less what every command says for itself."""
        changes = changes_of(type(self.options))
        kept = {key: value for key, value in plain(self.options).items() if changes.get(key) != "call"}
        write_yaml(folder / CONFIG_NAME, {key: value for key, value in kept.items() if value is not None})

    def loggers(self) -> list[Callback]:
        """Who is told of the numbers; ConfigError if a package is missing."""
        return choose_loggers(self.options.log_to)

    # Its parts

    @abstractmethod
    def open_data(self) -> DataFacts:
        """Find the samples, and look at what can be wrong with them. There is no run folder yet."""

    @abstractmethod
    def build(self, run: RunContext, saved: Sections | None) -> Model:
        """On the device; `saved` is the state that is continued. Its tensors are loaded later, by the run.

        `run` holds from here to the end.
        """

    @abstractmethod
    def open_batches(self, model: Model) -> DeviceBatches: ...

    @abstractmethod
    def job(self, model: Model) -> Job: ...

    @abstractmethod
    def schedule(self, model: Model, steps_per_epoch: int) -> Schedule: ...

    def steps(self, batches: DeviceBatches) -> int:
        """Of an epoch."""
        return len(batches)

    def compute_settings(self) -> ComputeSettings:
        return ComputeSettings()

    def preflight(self, model: Model) -> Iterator[str]:
        """Remarks about what this training needs of the machine; what is too little is a warning of its own."""
        return iter(())

    def num_kept_states(self, model: Model) -> int:
        """Whole states that stay for good."""
        return 0

    def started(self, model: Model) -> None:
        """Called once, before the first step of a new training."""

    def histograms(self) -> Mapping[str, np.ndarray]:
        """What is known of the data beforehand, for charts."""
        return {}

    @property
    def is_long(self) -> bool:
        """Whether trying out kernels is worth its time."""
        return True

    # After an epoch

    validates: bool = False
    """Whether there is something to validate on; without, the newest weights count as the best."""

    def plot_batches(self) -> None:
        """Pictures of the first batches, for people. The host may wait for the device here."""

    def is_due(self, epoch: int, *, last: bool) -> bool:
        """Whether this epoch is validated; all ranks answer alike."""
        return True

    def validate(self, model: Model, epoch: int, *, last: bool) -> ValidationResult | None:
        """All ranks call it, the first gets an answer. Interrupted if a signal wants it."""
        return None

    def due_mid_epoch(self, epoch: int, step: int) -> int | None:
        """Steps of the training so far, if a validation within an epoch is due after `step`; all ranks answer alike."""
        return None

    def mid_epoch_scalars(self, steps: int, found: ValidationResult) -> Mapping[str, float]:
        """Of a validation within an epoch, for charts; by the first rank."""
        return {}

    def rows(self, epoch: int, report: EpochReport, found: ValidationResult | None) -> EpochRecord:
        """What is written down of an epoch; by the first rank."""
        scores = dict(found.named) if found is not None else {}
        row = {"epoch": epoch, **report.items, "lr": report.lrs[0], **scores}
        scalars = {f"train/{name}": value for name, value in report.items.items()}
        scalars |= {"train/lr": report.lrs[0], "train/samples_per_s": report.samples_per_s}
        return EpochRecord(row, scalars | {f"val/{name}": value for name, value in scores.items() if value is not None})

    def after_epoch(
        self, model: Model, epoch: int, found: ValidationResult | None, sections: Callable[[], Sections], *, stops: bool
    ) -> None:
        """The end of an epoch is worked off. `sections` gives the whole state."""

    # What is saved

    @abstractmethod
    def describe_network(self, model: Model) -> dict[str, Any]:
        """What files of weights say about the network, without its tensors."""

    def describe_checkpoint(self, epoch: int, best_score: float) -> dict[str, Any]:
        """What else last.pt says about its weights; `epoch` is the last one that was worked off."""
        return {}

    def describe_run(self) -> dict[str, Any]:
        """What a saved state says about the run, beside config, data, environment and seed."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the job itself has to remember between two epochs."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """What `state` gave; keys may be missing that older versions did not save."""

    def best_weights(self, model: Model, epoch: int, found: ValidationResult | None) -> dict[str, Any]:
        """What best.pt says beside `about`, tensors included: copies, so that training may go on."""
        state = {key: tensor.detach().clone() for key, tensor in model.evaluated.state_dict().items()}
        return {"kind": "model", "state": state, "epoch": epoch, "score": None if found is None else found.score}

    def best_names(self, epoch: int) -> Iterable[str]:
        return ("best.pt",)

    def final_weights(
        self, model: Model, epoch: int, found: ValidationResult | None, best_score: float
    ) -> dict[str, Any] | None:
        """What last.pt says in the end, beside `about`: the weights alone. None: it stays a whole state."""
        return self.best_weights(model, epoch, found)

    # For people

    def figures(self, tick: IntervalStats) -> dict[str, str]:
        """Losses, speed and memory with their units, for the progress line."""
        shown = {"epoch": str(tick.epoch)}
        shown |= {name: f"{value:.4f}" for name, value in tick.items.items() if name != "total"}
        shown |= {"lr": f"{tick.lr:.1e}", "step": f"{tick.step_ms:.1f} ms", "wait": f"{tick.wait_ms:.1f} ms"}
        shown |= {"speed": f"{tick.samples_per_s:.0f} {self.samples}/s"}
        if torch.cuda.is_available():
            shown |= {"memory": f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"}
        return shown

    def hint(self, tick: IntervalStats) -> None:
        """Something to say about an interval."""

    def plot(self, folder: Path) -> None:
        """The results as a picture; OSError, ImportError and ValueError are said, and stop nothing."""

    def finished(self, folder: Path) -> None:
        """All files are on the disk; by the first rank."""


def write_yaml(path: Path, values: Mapping[str, Any]) -> None:
    content = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).encode()
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)


@dataclass(frozen=True)
class RunResult:
    """What a training left behind."""

    folder: Path
    outcome: Any
    """Of the last validation; None if there was none."""
    best_score: float
    finished: bool
    """False if it was asked to end early; the same command then continues."""
    why: str = ""
    """Why it ended early."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Means over the last epoch."""
