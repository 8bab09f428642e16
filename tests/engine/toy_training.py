"""What the toy trains, as the loop sees it: a network with batch norm and dropout, a schedule, a job.

The job does to itself what a test asks for: signals, poison, a lack of memory, at steps named as epoch:step. Steps of
the validation follow those of the epoch.
"""

import argparse
import logging
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.engine.environment import environment
from flatout.engine.interrupts import Interrupts
from flatout.engine.job import EpochReport
from flatout.engine.records import Records
from flatout.engine.schedule import Knobs
from flatout.errors import Interrupted
from flatout.feed import Feed, FeedConfig, Plan
from tests.engine.toy_data import NUM_KINDS, Noise

logger = logging.getLogger(__name__)

NUM_VALIDATED = 3
NO_WORKERS = FeedConfig(workers=0)
FIRST_LR, WARMUP = 0.02, 5
WALL_CLOCK = time.time


def toy_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, NUM_KINDS),
    )  # fmt: skip


class ToySchedule:
    """A short warm-up, then a straight line to zero; an optimizer step at the end of every window."""

    def __init__(self, epochs: int, steps: int, window: int) -> None:
        self._steps, self._total, self._window = steps, epochs * steps, window

    def __call__(self, epoch: int, step: int) -> Knobs:
        done = epoch * self._steps + step
        lr = FIRST_LR * min(1.0, (done + 1) / WARMUP) * (1 - done / self._total)
        return Knobs(lrs=(lr,), momentum=0.9, steps=(step + 1) % self._window == 0)


class ToyJob:
    """The job, as the loop sees it."""

    item_names = ("loss", "accuracy")
    fillings: Mapping[str, Any] = {}

    def __init__(
        self,
        options: argparse.Namespace,
        network: nn.Module,
        average: nn.Module,
        records: Records,
        interrupts: Interrupts,
        data: str,
    ) -> None:
        """`data` is a fingerprint of what is trained on."""
        self._options, self._network, self._average = options, network, average
        self._records, self._interrupts, self._data = records, interrupts, data
        self._history: list[list[float]] = []
        self._poisoned = False
        self._visited: set[tuple[int, int]] = set()

    def phase(self, epoch: int) -> object:
        return None

    def inputs(self, batch: Any, epoch: int, step: int) -> dict[str, Tensor]:
        self._obey(epoch, step)
        time.sleep(self._options.delay_ms / 1e3)
        if self._options.clock_jump_s:
            time.time = lambda: WALL_CLOCK() + self._options.clock_jump_s * (-1) ** step
        logger.debug("epoch %d step %d samples %s", epoch, step, batch.indices.tolist())
        image = torch.from_numpy(batch["image"].astype(np.float32) / 255)
        if self._is_at(self._options.poison_input, epoch, step):
            image[0, 0, 0, 0] = torch.nan
        self._poisoned = self._is_at(self._options.poison_loss, epoch, step)
        self._visited.add((epoch, step))
        inputs = {"image": image, "label": torch.from_numpy(batch["label"].copy())}
        return {name: tensor.to(self._options.device) for name, tensor in inputs.items()}

    def _obey(self, epoch: int, step: int) -> None:
        """Whatever a test has in store for this step."""
        for order in filter(None, self._options.signal_at.split(",")):
            place, _, name = order.rpartition(":")
            if self._is_at(place, epoch, step):
                os.kill(os.getpid(), getattr(signal, name))
        if self._is_at(self._options.poison_weights, epoch, step):
            with torch.no_grad():
                next(self._network.parameters())[0] = torch.nan
        if self._is_at(self._options.no_memory, epoch, step):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    def _is_at(self, places: str, epoch: int, step: int) -> bool:
        once = self._options.transient and (epoch, step) in self._visited
        return f"{epoch}:{step}" in places.split(",") and not once

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = network(inputs["image"])
        loss = F.cross_entropy(logits, inputs["label"])
        accuracy = (logits.argmax(1) == inputs["label"]).float().mean()
        loss = loss * torch.nan if self._poisoned else loss
        return loss, torch.stack((loss.detach(), accuracy))

    def end_epoch(self, epoch: int, report: EpochReport) -> bool:
        score = self._validate(epoch)
        row = [epoch, report.items["loss"], report.items["accuracy"], score, report.num_bad]
        self._history.append(row)
        self._records.line("results.txt", " ".join(f"{value:.17g}" for value in row))
        self._records.row("results.csv", dict(zip(("epoch", "loss", "accuracy", "val", "bad"), row, strict=True)))
        self._records.event("log.jsonl", {"epoch": epoch, "val": score})
        return False

    def _validate(self, epoch: int) -> float:
        right = 0.0
        with Feed(Noise(8 * NUM_VALIDATED), Plan(num_samples=8 * NUM_VALIDATED, batch_size=8), NO_WORKERS) as feed:
            for batch in feed.epoch(0):
                self._obey(epoch, self._options.steps + batch.step)
                if self._interrupts.requested is not None:
                    raise Interrupted.by(self._interrupts.requested)
                image = torch.from_numpy(batch["image"].astype(np.float32) / 255).to(self._options.device)
                right += float((self._average(image).argmax(1).cpu().numpy() == batch["label"]).mean())
        return right / NUM_VALIDATED

    def sections(self) -> dict[str, dict[str, object]]:
        return {
            "weights": {"kind": "toy"},
            "run": {"data": self._data, "environment": environment()},
            "job": {"history": [list(row) for row in self._history], "records": self._records.state_dict()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._history = [list(row) for row in state["history"]]
        self._records.load_state_dict(state["records"])

    def flush(self) -> None:
        """Nothing is written beside the generations."""
