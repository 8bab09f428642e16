"""The toy job with injected faults: signals, NaN, out of memory, mechanisms switched off.

    python -m tests.runs.toy_faults --project FOLDER --signal-at 1:5:SIGTERM ...

Steps are given as epoch:step; those of the validation follow those of the epoch. It uses flatout's own entry point, so
that exit codes and messages are those of any command.
"""

import functools
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout import __main__ as flatout_main
from flatout.cli import Command, option
from flatout.engine.job import Sections
from flatout.engine.loop import Loop
from flatout.feed import Feed, FeedConfig, Plan
from flatout.feed.device import DeviceBatch, DeviceBatches
from flatout.ranks import world as ranks
from flatout.runs.command import TrainCommand
from flatout.runs.recipe import DataFacts, Model, ValidationResult
from tests.runs.toy_images import NoisyImages, UnkeyedImages
from tests.runs.toy_job import BATCH, ToyJob, ToyOptions, ToyRecipe

logger = logging.getLogger(__name__)

WALL_CLOCK = time.time


@dataclass(frozen=True, kw_only=True)
class FaultyOptions(ToyOptions):
    """Options for the faults of a test."""

    threads: int = option(1, "threads of torch", change="exact")
    delay_ms: float = option(0.0, "delay before every step", change="exact")
    clock_jump_s: float = option(0.0, "jump of the wall clock at every step", change="exact")
    lost_after_s: float = option(25.0, "time without a heartbeat after which a rank is lost", change="exact")
    transient: bool = option(False, "faults occur only once", change="exact")
    unkeyed: bool = option(False, "a mechanism switched off, for negative controls", change="exact")
    unseeded: bool = option(False, "a mechanism switched off, for negative controls", change="exact")
    unshared: bool = option(False, "a mechanism switched off, for negative controls", change="exact")
    forget: str = option("", "a part that a resume does not restore, for negative controls", change="call")
    signal_at: str = option("", "epoch:step:SIGNAL,...", change="call")
    poison_loss: str = option("", "epoch:step,...", change="call")
    poison_input: str = option("", "epoch:step,...", change="call")
    poison_weights: str = option("", "epoch:step,...", change="call")
    no_memory: str = option("", "epoch:step,...", change="call")

    device: str = option("cpu", "cpu, or a GPU", change="exact")
    log_every: int = option(4, "steps between two log lines", change="exact")
    save_every_steps: int = option(6, "maximum number of steps between two checkpoints", change="exact")
    log_to: tuple[str, ...] = option(("none",), "loggers", change="exact")
    no_preflight: bool = option(True, "skip the checks of the machine", change="call")


class Faults:
    """Injects the requested faults at the requested steps."""

    def __init__(self, options: FaultyOptions, network: nn.Module) -> None:
        self._options, self._network = options, network
        self._visited: set[tuple[int, int]] = set()
        self.poisoned = False

    def at(self, epoch: int, step: int) -> None:
        options = self._options
        for order in filter(None, options.signal_at.split(",")):
            place, _, name = order.rpartition(":")
            if self.is_at(place, epoch, step):
                os.kill(os.getpid(), getattr(signal, name))
        if self.is_at(options.poison_weights, epoch, step):
            with torch.no_grad():
                next(self._network.parameters())[0] = torch.nan
        if self.is_at(options.no_memory, epoch, step):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        if options.clock_jump_s:
            time.time = lambda: WALL_CLOCK() + options.clock_jump_s * (-1) ** step
        self.poisoned = self.is_at(options.poison_loss, epoch, step)

    def is_at(self, places: str, epoch: int, step: int) -> bool:
        once = self._options.transient and (epoch, step) in self._visited
        return f"{epoch}:{step}" in places.split(",") and not once

    def passed(self, epoch: int, step: int) -> None:
        self._visited.add((epoch, step))


class FaultyJob(ToyJob):
    """A step with faults."""

    def __init__(self, options: FaultyOptions, faults: Faults) -> None:
        self._options, self._faults, self._has_started = options, faults, False

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        if not self._has_started:
            self._has_started = True
            logger.info("training")
        self._faults.at(epoch, step)
        time.sleep(self._options.delay_ms / 1e3)
        logger.debug("epoch %d step %d samples %s", epoch, step, batch.indices.tolist())
        inputs = super().inputs(batch, epoch, step)
        if self._faults.is_at(self._options.poison_input, epoch, step):
            inputs["image"][0, 0, 0, 0] = torch.nan
        self._faults.passed(epoch, step)
        return inputs

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss, items = super().step(network, inputs)
        return (loss * torch.nan, items * torch.nan) if self._faults.poisoned else (loss, items)


class FaultyRecipe(ToyRecipe):
    """A run with faults."""

    options: FaultyOptions

    def open_data(self) -> DataFacts:
        torch.set_num_threads(self.options.threads)
        return super().open_data()

    def job(self, model: Model) -> FaultyJob:
        self._faults = Faults(self.options, model.network)
        return FaultyJob(self.options, self._faults)

    def open_batches(self, model: Model) -> DeviceBatches:
        options = self.options
        images = (UnkeyedImages if options.unkeyed else NoisyImages)(BATCH * options.steps)
        plan = Plan(
            num_samples=len(images), batch_size=self.world.batch_per_rank(BATCH),
            seed=0 if options.unseeded else self.seed,
            rank=0 if options.unshared else self.world.rank, num_ranks=self.world.size,
        )  # fmt: skip
        feed = Feed(images, plan, FeedConfig(workers=options.workers))
        return DeviceBatches(self._run.stack.enter_context(feed), self.device)

    def validated_batches(self, epoch: int) -> Iterator[DeviceBatch]:
        for number, batch in enumerate(super().validated_batches(epoch)):
            self._faults.at(epoch, self.options.steps + number)
            yield batch

    def final_weights(self, *about: Any) -> None:
        """None: last.pt stays a whole checkpoint, to be compared."""

    def after_epoch(
        self, model: Model, epoch: int, found: ValidationResult | None, sections: Callable[[], Sections], *, stops: bool
    ) -> None:
        weights = b"".join(weight.detach().cpu().numpy().tobytes() for weight in model.network.parameters())
        if epoch + 1 == model.epochs:
            logger.debug("weights %s", hashlib.sha256(weights).hexdigest())


class FaultyCommand(TrainCommand):
    """Switches off mechanisms before it trains; the process is used for nothing else."""

    def run_training(self, options: Any, *rest: Any) -> None:
        ranks.process_group = functools.partial(ranks.process_group, lost_after_s=options.lost_after_s)
        if options.forget:
            _forget(options.forget)
        super().run_training(options, *rest)


def _forget(part: str) -> None:
    """Let a resume keep one part as it is at the start of a training instead of restoring it."""
    load_sections = Loop.load_sections

    def load(self: Loop, sections: Mapping[str, Any]) -> None:
        new, changed = self.sections(), {name: dict(section) for name, section in sections.items()}
        where = "training" if part in changed["training"] else "weights"
        changed[where][part] = new[where][part]
        load_sections(self, changed)

    Loop.load_sections = load  # type: ignore[method-assign]


COMMAND = FaultyCommand("toy", FaultyOptions, "tests.runs.toy_faults:FaultyRecipe")


def main(argv: Sequence[str]) -> int:
    """The training command, as `flatout yolo train` is one."""
    logging.basicConfig(level=os.environ.get("TOY_LOG", "INFO"), format="%(message)s", stream=sys.stderr, force=True)
    # flatout's own logger gets a level from the command.
    logging.root.handlers[0].setLevel(logging.root.level)
    return COMMAND.main(argv)


def run_command() -> int:
    flatout_main.COMMANDS["toy"] = Command("a training to be killed", "tests.runs.toy_faults")
    return flatout_main.main(["toy", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run_command())
