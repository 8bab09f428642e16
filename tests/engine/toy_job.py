"""A training small enough to be killed a hundred times: the real loop, real files, real signals.

    python -m tests.engine.toy_job --project FOLDER [--workers 2] ...

A convolutional network with batch norm and dropout learns to tell four kinds of noise apart: 4 epochs of 10 steps,
two of which make an optimizer step. It goes through flatout's own door, so that exit codes and messages are those of
any command.
"""

import argparse
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout import __main__ as door
from flatout.door import Command
from flatout.engine import distributed
from flatout.engine.determinism import set_determinism
from flatout.engine.distributed import World
from flatout.engine.ema import MovingAverage
from flatout.engine.environment import differences, environment
from flatout.engine.generations import Generations
from flatout.engine.interrupts import Interrupts
from flatout.engine.job import EpochReport
from flatout.engine.loop import Loop, LoopConfig, StoppedAfter
from flatout.engine.optim import make_optimizer
from flatout.engine.random_state import seed_all
from flatout.engine.records import Records
from flatout.engine.run_folder import Run, choose_run, newest_last
from flatout.engine.schedule import Knobs
from flatout.errors import DataError, Interrupted
from flatout.feed import Feed, FeedConfig, Plan
from tests.engine.toy_data import NUM_KINDS, Noise

logger = logging.getLogger(__name__)

NUM_VALIDATED = 3
WALL_CLOCK = time.time
FIRST_LR, WARMUP = 0.02, 5


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
    ) -> None:
        self._options, self._network, self._average = options, network, average
        self._records, self._interrupts = records, interrupts
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
        """Whatever a test has in store for this step; those of the validation follow those of the epoch."""
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
            "run": {"data": fingerprint(self._options), "environment": environment()},
            "job": {"history": [list(row) for row in self._history], "records": self._records.state_dict()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._history = [list(row) for row in state["history"]]
        self._records.load_state_dict(state["records"])

    def flush(self) -> None:
        """Nothing is written beside the generations."""


NO_WORKERS = FeedConfig(workers=0)


class ToyBatches:
    """A feed of one epoch's length for every epoch."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return self._feed.epoch(epoch, start=start)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="toy")
    made.add_argument("--project", type=Path, default=Path("runs"))
    made.add_argument("--name", default="toy")
    made.add_argument("--labels", type=Path)
    made.add_argument("--device", default="cpu")
    made.add_argument("--resume", nargs="?", const=True, default=None)
    for name, default in {"epochs": 4, "steps": 10, "seed": 1, "window": 2, "workers": 0, "threads": 1}.items():
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--log-every", type=int, default=4)
    made.add_argument("--save-every-steps", type=int, default=6)
    made.add_argument("--stop-after", type=int)
    made.add_argument("--delay-ms", type=float, default=0)
    made.add_argument("--clock-jump-s", type=float, default=0)
    for name in ("exist-ok", "fresh", "break-lock", "allow-data-change", "transient", "deterministic"):
        made.add_argument(f"--{name}", action="store_true")
    made.add_argument("--signal-at", default="", help="epoch:step:SIGNAL,...")
    for name in ("poison-loss", "poison-input", "poison-weights", "no-memory"):
        made.add_argument(f"--{name}", default="", help="epoch:step,...")
    made.add_argument("--forget", default="", help="what a resume leaves out, for negative controls")
    return made


def main(argv: Sequence[str]) -> int:
    """A command of flatout, as `flatout yolo train` is one."""
    logging.basicConfig(level=os.environ.get("TOY_LOG", "INFO"), format="%(message)s", stream=sys.stderr, force=True)
    train(parser().parse_args(argv))
    return 0


def train(options: argparse.Namespace) -> Path:
    """Begin or continue a run; returns its folder."""
    torch.set_num_threads(options.threads)
    resume = newest_last(Path.cwd()) if options.resume is True else options.resume and Path(options.resume)
    config = {key: getattr(options, key) for key in ("epochs", "steps", "seed", "window")}
    world = distributed.read_world()
    distributed.join(world, torch.device("cpu"))
    # Only the first rank has the run; the others look on in folders of their own.
    project = options.project if world.is_first else options.project / f"rank{world.rank}"
    with ExitStack() as stack:
        stack.callback(distributed.leave, world)
        run = stack.enter_context(
            choose_run(
                project, options.name, config=config, exist_ok=options.exist_ok, fresh=options.fresh,
                resume=resume, break_lock=options.break_lock,
            )
        )  # fmt: skip
        logger.info("%s %s", "continuing" if run.continues else "beginning", run.folder)
        loop = prepare(options, run, world, stack)
        logger.info("training")
        try:
            loop.run()
        except StoppedAfter:
            return run.folder
        logger.debug("weights %s", digest_of(loop.network))
        run.finish()
        return run.folder


def prepare(options: argparse.Namespace, run: Run, world: World, stack: ExitStack) -> Loop:
    seed_all(options.seed)
    set_determinism(options.deterministic, long_run=False)
    network = toy_network().to(options.device)
    average = MovingAverage(network, decay=0.9, ramp=5)
    interrupts = stack.enter_context(Interrupts())
    records = stack.enter_context(Records(run.folder))
    per_epoch = 8 * options.steps
    plan = Plan(
        num_samples=per_epoch, batch_size=8 // world.size, seed=options.seed, rank=world.rank, num_ranks=world.size
    )
    feed = stack.enter_context(Feed(Noise(per_epoch), plan, FeedConfig(workers=options.workers)))
    (run.folder / "weights").mkdir(exist_ok=True)
    generations = Generations(run.folder / "weights")
    loop = Loop(
        job=ToyJob(options, network, average.network, records, interrupts),
        network=network,
        optimizer=make_optimizer("sgd", [list(network.parameters())], lr=0.01, momentum=0.9, decays=[1e-4]),
        schedule=ToySchedule(options.epochs, options.steps, options.window),
        batches=ToyBatches(feed),
        config=LoopConfig(
            epochs=options.epochs, steps_per_epoch=options.steps, log_every=options.log_every,
            save_every_steps=options.save_every_steps, stop_after=options.stop_after,
        ),
        device=torch.device(options.device),
        average=average,
        generations=generations,
        interrupts=interrupts,
        world=world,
        forward=nn.parallel.DistributedDataParallel(network) if world.size > 1 else network,
    )  # fmt: skip
    if not run.continues:
        generations.forget()
    saved = generations.load()
    if saved is None:
        records.clear()
    else:
        about: Any = saved.sections["run"]
        for line in differences(about["environment"], environment()):
            logger.warning("%s", line)
        check_data(about["data"], fingerprint(options), allowed=options.allow_data_change)
        loop.load_sections(without(saved.sections, options.forget, loop))
        logger.info("continuing at epoch %d step %d", loop.epoch, loop.step)
    return loop


def digest_of(network: nn.Module) -> str:
    return hashlib.sha256(
        b"".join(weight.detach().cpu().numpy().tobytes() for weight in network.parameters())
    ).hexdigest()


def without(sections: dict[str, Any], forgotten: str, loop: Loop) -> dict[str, Any]:
    """The sections, with one part as it is in a training that has just begun."""
    new = loop.sections()
    if forgotten in sections["training"]:
        sections["training"][forgotten] = new["training"][forgotten]
    elif forgotten:
        sections["weights"][forgotten] = new["weights"][forgotten]
    return sections


def fingerprint(options: argparse.Namespace) -> str:
    content = options.labels.read_bytes() if options.labels else b""
    return hashlib.sha256(content).hexdigest()


def check_data(saved: str, now: str, *, allowed: bool) -> None:
    if saved != now and not allowed:
        raise DataError("the labels have changed since this run was saved. Continue with them: --allow-data-change")


def run_command() -> int:
    door.COMMANDS["toy"] = Command("a training to be killed", "tests.engine.toy_job")
    return door.main(["toy", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run_command())
