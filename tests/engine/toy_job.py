"""A training small enough to be killed a hundred times: the real loop, real files, real signals.

    python -m tests.engine.toy_job --project FOLDER [--workers 2] ...

A convolutional network learns to tell four kinds of noise apart in 4 epochs of 10 steps; every second step ends an
accumulation window. It goes through flatout's own door, so that exit codes and messages are those of any command.
"""

import argparse
import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from flatout import __main__ as door
from flatout.door import Command
from flatout.engine import distributed
from flatout.engine.callbacks import Callbacks, RunStart
from flatout.engine.determinism import set_determinism
from flatout.engine.distributed import World
from flatout.engine.ema import MovingAverage
from flatout.engine.ending import telling_end
from flatout.engine.environment import differences, environment
from flatout.engine.generations import Generations
from flatout.engine.interrupts import Interrupts
from flatout.engine.loop import Loop, LoopConfig, StoppedAfter
from flatout.engine.mirror import Mirror
from flatout.engine.optim import make_optimizer
from flatout.engine.random_state import seed_all
from flatout.engine.records import Records
from flatout.engine.run_folder import Run, choose_run, newest_last
from flatout.engine.shared_state import load_for_all
from flatout.errors import DataError
from flatout.feed import Feed, FeedConfig, Plan
from tests.engine.toy_data import Noise
from tests.engine.toy_training import ToyJob, ToySchedule, toy_network

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class Place(NamedTuple):
    """The run folder, as every rank knows it; the first one holds its lock."""

    folder: Path
    continues: bool


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
    made.add_argument("--lost-after-s", type=float, default=25)
    made.add_argument("--mirror", default="")
    for name in ("exist-ok", "fresh", "break-lock", "allow-data-change", "transient", "deterministic"):
        made.add_argument(f"--{name}", action="store_true")
    for name in ("unkeyed", "unseeded", "unshared"):
        made.add_argument(f"--{name}", action="store_true", help="a mechanism left out, for negative controls")
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
    resume = newest_last(Path(options.project)) if options.resume is True else options.resume and Path(options.resume)
    config = {key: getattr(options, key) for key in ("epochs", "steps", "seed", "window")}
    world = distributed.read_world()
    with distributed.together(world, CPU, lost_after_s=options.lost_after_s), ExitStack() as stack:
        run: Run | None = None
        hearers = []
        if world.is_first and options.mirror:
            hearers = [Mirror(options.mirror, options.name, patience_s=30)]
            fetched = hearers[0].fetch(options.project, options.name, config)
            if fetched is not None and fetched.finished:
                return fetched.folder
        callbacks = Callbacks(hearers)
        if world.is_first:
            run = stack.enter_context(
                choose_run(
                    options.project, options.name, config=config, exist_ok=options.exist_ok, fresh=options.fresh,
                    resume=resume, break_lock=options.break_lock,
                )
            )  # fmt: skip
        place = Place(*world.from_first((run.folder, run.continues) if run else None))
        logger.info("%s %s", "continuing" if place.continues else "beginning", place.folder)
        with telling_end(callbacks, place.folder) as ending, distributed.telling_ranks():
            loop = prepare(options, place, world, stack, callbacks)
            callbacks.start(
                RunStart(
                    job="toy", folder=place.folder, config=config, epoch=loop.epoch, epochs=options.epochs,
                    continues=place.continues,
                )
            )  # fmt: skip
            logger.info("training")
            try:
                loop.run()
            except StoppedAfter as stopped:
                ending.why = str(stopped)
                return place.folder
            logger.debug("weights %s", digest_of(loop.network))
            if run is not None:
                run.finish()
        return place.folder


def prepare(options: argparse.Namespace, run: Place, world: World, stack: ExitStack, callbacks: Callbacks) -> Loop:
    seed_all(options.seed)
    set_determinism(options.deterministic, long_run=False)
    network = toy_network().to(options.device)
    average = MovingAverage(network, decay=0.9, ramp=5)
    interrupts = stack.enter_context(Interrupts())
    records = stack.enter_context(Records(run.folder if world.is_first else scratch(run.folder, world)))
    per_epoch = 8 * options.steps
    plan = Plan(
        num_samples=per_epoch, batch_size=8 // world.size, seed=0 if options.unseeded else options.seed,
        rank=0 if options.unshared else world.rank, num_ranks=world.size,
    )  # fmt: skip
    feed = stack.enter_context(
        Feed(Noise(per_epoch, unkeyed=options.unkeyed), plan, FeedConfig(workers=options.workers))
    )
    (run.folder / "weights").mkdir(exist_ok=True)
    generations = Generations(run.folder / "weights")
    loop = Loop(
        job=ToyJob(options, network, average.network, records, interrupts, fingerprint(options)),
        network=network,
        optimizer=make_optimizer("sgd", [list(network.parameters())], lr=0.01, momentum=0.9, decays=[1e-4]),
        schedule=ToySchedule(options.epochs, options.steps, options.window),
        batches=feed,
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
        callbacks=callbacks,
    )  # fmt: skip
    if not run.continues and world.is_first:
        generations.forget()
    saved = load_for_all(generations, world)
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


def scratch(folder: Path, world: World) -> Path:
    """Where a rank that is not the first writes what nobody reads."""
    own = folder / f"rank{world.rank}"
    own.mkdir(exist_ok=True)
    return own


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
