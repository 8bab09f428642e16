"""A complete job, an image classifier, explained in docs/new-job.md; its images come from toy_images.py.

    python -m tests.runs.toy_job --epochs 4 [any flag of a run]

Four epochs of ten steps; every second step ends an accumulation window. Resuming, ranks, loggers, mirrors, budgets,
signals and exit codes need no code here: they are part of the run.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout import __main__ as flatout_main
from flatout.cli import Command, option
from flatout.clock import clock
from flatout.engine.job import Schedule, Sections, StepSettings
from flatout.engine.optim import MovingAverage, make_optimizer
from flatout.feed import Feed, FeedConfig, Plan
from flatout.feed.device import DeviceBatch, DeviceBatches
from flatout.runs.command import TrainCommand
from flatout.runs.options import RunOptions
from flatout.runs.recipe import DataFacts, Model, Recipe, RunContext, ValidationResult
from tests.runs.toy_images import NUM_KINDS, NoisyImages

BATCH, NUM_VALIDATED = 12, 3
FIRST_LR, WARMUP = 0.02, 5


@dataclass(frozen=True, kw_only=True)
class ToyOptions(RunOptions):
    """The toy's own options, besides those of every run."""

    epochs: int = option(4, "passes over the images")
    steps: int = option(10, "steps of a pass")
    window: int = option(2, "steps of an accumulation window")
    seed: int = option(1, "seed of initial weights, order and noise")
    workers: int = option(0, "processes that make images", change="exact")
    labels: str = option("", "a file that identifies the data", change="place")
    name: str = option("toy", "name of the run", change="exact")


class ToyJob:
    """The computation of a step."""

    item_names = ("loss", "accuracy")
    paddings: Mapping[str, Any] = {}

    def phase(self, epoch: int) -> object:
        return None

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        return {"image": batch["image"].float() / 255, "label": batch["label"]}

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with clock.stage("train.forward"):  # rows of a profile
            logits = network(inputs["image"])
        with clock.stage("train.loss"):
            loss = F.cross_entropy(logits, inputs["label"])
        accuracy = (logits.argmax(1) == inputs["label"]).float().mean()
        return loss, torch.stack((loss.detach(), accuracy))


class ToyRecipe(Recipe):
    """The parts of a training that are specific to this job."""

    name = "toy"
    validates = True
    options: ToyOptions

    @property
    def seed(self) -> int:
        return self.options.seed

    def open_data(self) -> DataFacts:
        content = Path(self.options.labels).read_bytes() if self.options.labels else b""
        return DataFacts(hashlib.sha256(content).hexdigest(), "the labels")

    def build(self, run: RunContext, saved: Sections | None) -> Model:
        self._run = run
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
            nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, NUM_KINDS),
        ).to(self.device)  # fmt: skip
        optimizer = make_optimizer("sgd", [list(network.parameters())], lr=0.01, momentum=0.9, decays=[1e-4])
        average = MovingAverage(network, decay=0.9, ramp=5)
        return Model(network=network, optimizer=optimizer, average=average, epochs=self.options.epochs)

    def open_batches(self, model: Model) -> DeviceBatches:
        plan = Plan(
            num_samples=BATCH * self.options.steps, batch_size=self.world.batch_per_rank(BATCH), seed=self.seed,
            rank=self.world.rank, num_ranks=self.world.size,
        )  # fmt: skip
        feed = Feed(NoisyImages(plan.num_samples), plan, FeedConfig(workers=self.options.workers))
        return DeviceBatches(self._run.stack.enter_context(feed), self.device)

    def job(self, model: Model) -> ToyJob:
        return ToyJob()

    def schedule(self, model: Model, steps_per_epoch: int) -> Schedule:
        return self.settings

    def settings(self, epoch: int, step: int) -> StepSettings:
        """A short warm-up, then a linear decay to zero; an optimizer step at the end of every window."""
        done, total = epoch * self.options.steps + step, self.options.epochs * self.options.steps
        lr = FIRST_LR * min(1.0, (done + 1) / WARMUP) * (1 - done / total)
        return StepSettings(lrs=(lr,), momentum=0.9, step_optimizer=(step + 1) % self.options.window == 0)

    @torch.no_grad()
    def validate(self, model: Model, epoch: int, *, last: bool) -> ValidationResult:
        right = 0.0
        for batch in self.validated_batches(epoch):
            self._run.stop_if_asked()
            found = model.evaluated(batch["image"].float() / 255).argmax(1)
            right += float((found == batch["label"]).float().mean())
        accuracy = right / NUM_VALIDATED
        return ValidationResult(accuracy, {"val_accuracy": accuracy}, accuracy, f"accuracy {accuracy:.3f}")

    def validated_batches(self, epoch: int) -> Iterator[DeviceBatch]:
        plan = Plan(num_samples=BATCH * NUM_VALIDATED, batch_size=BATCH)
        with Feed(NoisyImages(plan.num_samples), plan, FeedConfig(workers=0)) as feed:
            yield from DeviceBatches(feed, self.device).epoch(0)

    def describe_network(self, model: Model) -> dict[str, Any]:
        return {"job": "toy"}


COMMAND = TrainCommand("toy", ToyOptions, "tests.runs.toy_job:ToyRecipe")
main = COMMAND.main

if __name__ == "__main__":
    flatout_main.COMMANDS["toy"] = Command("a classifier", "tests.runs.toy_job")
    sys.exit(flatout_main.main(["toy", *sys.argv[1:]]))
