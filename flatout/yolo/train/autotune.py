"""What a picture and a step cost on this machine, for those who leave the input to us: measured, and remembered.

    a few pictures read and augmented here, a step on made-up pictures  -->  Costs  --choose_input-->  choices

`--fast` leaves open where and how pictures are kept, who augments them and how many workers there are (at most
`--workers` of them); `--workers auto` by itself only the last. A second or two, and no more than a twentieth of the run
goes into pictures beyond the first sixteen; what was measured is remembered beside what it depends on. Runs so short
that this would be more than a twentieth of them are not measured: a fixed rule decides then.
"""

import hashlib
import importlib.util
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from flatout.clock import machine
from flatout.config import build_config
from flatout.errors import ConfigError
from flatout.feed import Feed, FeedConfig, Plan, default_folder
from flatout.profiler import DeviceTrace, machine_facts
from flatout.yolo.augment.layout import decoded_bytes
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.augment.source import TrainingSource
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.train.choose_input import (
    Asked,
    Choice,
    Costs,
    Machine,
    Measured,
    choose_input,
    is_worth_measuring,
    most_workers,
    place_given,
    rule_in_words,
)
from flatout.yolo.train.input import InputConfig

logger = logging.getLogger(__name__)

RENDER_MS_PER_GPX = 50.0
"""Augmenting on the device: 384 pictures of 320 px in 2 ms, complete (bench/results/augment_gpu_h200_202611.md)."""
LONG_RUN_PIXELS = {"cuda": 1e11, "cpu": 1e8}
"""Pixels that the network is shown in a run worth measuring: 10,000 pictures of 320 px for a hundred epochs on a GPU,
a thousand once on a CPU."""
LONGEST_S, SHARE_OF_RUN = 60.0, 0.05
"""How long measuring may take."""
TUNINGS = "tunings.json"
MOST_CORES = 1 << 16
"""That a file may speak of."""


@dataclass(frozen=True)
class Situation:
    """Machine and costs as the first rank found them: all that a decision rests on beside what was asked."""

    machine: Machine
    costs: Costs

    def plain(self) -> dict[str, Any]:
        """In values that JSON knows."""
        return asdict(self)

    @classmethod
    def of(cls, plain: object) -> Self:
        """From what `plain` returned; ConfigError for anything else."""
        return build_config(plain, cls, where="situation")

    @property
    def is_plausible(self) -> bool:
        """Whether somebody can have found these numbers."""
        measured = {} if self.costs.measured is None else asdict(self.costs.measured)
        numbers = {**asdict(self.machine), **asdict(self.costs), **measured}
        found = [value for value in numbers.values() if isinstance(value, int | float)]
        return self.machine.cores <= MOST_CORES and all(0 <= value < math.inf for value in found)


def input_choices(
    images: ImageSet,
    config: InputConfig,
    asked: Asked,
    network: nn.Module,
    *,
    graphs: bool = False,
    file: Path | None = None,
) -> tuple[Choice, ...]:
    """Ways to run the input, best first; all ranks follow the first one's machine and measurement.

    `graphs`: steps are replayed as CUDA graphs. `file` is where measurements are remembered.
    """
    if not asked.leaves_something_open:
        return choose_input(asked, this_machine(config), unmeasured(images, config))
    found = None
    if config.world.is_first:
        found = _situation(images, config, asked, network, Tunings(file or default_folder().parent / TUNINGS), graphs)
    situation = Situation.of(config.world.broadcast(found.plain() if found is not None else None))
    choices = choose_input(asked, situation.machine, situation.costs)
    if config.world.is_first:
        _tell(asked, situation, choices)
    return choices


def _tell(asked: Asked, situation: Situation, choices: tuple[Choice, ...]) -> None:
    if situation.costs.measured is None and is_worth_measuring(asked, gpu=situation.machine.has_gpu):
        logger.info("%s", rule_in_words(asked, choices[0]))
    if asked.fast:
        for number, choice in enumerate(choices, 1):
            logger.info("--fast, choice %d: %s.", number, choice)


def _situation(
    images: ImageSet, config: InputConfig, asked: Asked, network: nn.Module, tunings: "Tunings", graphs: bool
) -> Situation:
    """As remembered, else as measured; without measurement where that is not worth it."""
    on_gpu = config.device.type == "cuda"
    here = Situation(this_machine(config), unmeasured(images, config))
    if not (is_worth_measuring(asked, gpu=on_gpu) and is_long(images, config)):
        return here
    graphs = graphs and on_gpu and config.world.size == 1
    facts = machine_facts() | {
        "asked": f"{asked.flag}, {place_given(asked) or 'any place'}, 4:2:0 {asked.store_420}"
        + ("" if asked.device_augment is not False else ", not on the device"),
        "device": str(config.device),
        # Where they lie, too: the same numbers of pictures and pixels may come from a slower disk.
        "data": f"{len(images)} pictures, {int(images.size_wh_N2.sum())}, {Path(images.paths[0]).parent}",
        "input": f"{config.size} px, batch {config.batch_size}, {config.augment}",
        "network": f"{sum(parameter.numel() for parameter in network.parameters())} parameters",
        "run": "several epochs" if config.epochs > 1 else "one epoch",
        "ranks": str(config.world.size),
        "workers": f"{most_workers(asked, here.machine, here.costs)} at most",
        "graphs": str(graphs),
    }
    if (known := tunings.recall(facts)) is not None:
        logger.info("%s, as measured before: %s.", asked.flag, _expected(asked, known))
        return known
    began = time.perf_counter()
    measured = measure(images, config, asked, network, graphs=graphs)
    # Asked again: how much memory is free depends on what a step has taken.
    found = Situation(this_machine(config), replace(here.costs, measured=measured))
    logger.info("%s, measured in %.1f s: %s.", asked.flag, time.perf_counter() - began, _expected(asked, found))
    try:
        tunings.remember(facts, found)
    except OSError as error:
        logger.info("The measurement is not remembered: %s.", error.strerror)
    return found


def _expected(asked: Asked, situation: Situation) -> str:
    first = choose_input(asked, situation.machine, situation.costs)[0]
    return f"{first.what}: {first.img_s:,.0f} img/s expected"


def is_long(images: ImageSet, config: InputConfig) -> bool:
    """Whether the run is so long that measuring is a small part of it."""
    return config.epochs * len(images) * config.size**2 > LONG_RUN_PIXELS.get(config.device.type, 0.0)


def this_machine(config: InputConfig) -> Machine:
    """What this rank finds."""
    on_gpu = config.device.type == "cuda"
    return Machine(
        cores=machine.cores().usable,
        ram_free_bytes=machine.memory().free,
        gpu_free_bytes=torch.cuda.mem_get_info(config.device)[0] if on_gpu else None,
        nvjpeg=on_gpu and importlib.util.find_spec("torchvision") is not None,
        ranks=config.world.size,
        ranks_here=config.world.size_here,
    )


def unmeasured(images: ImageSet, config: InputConfig) -> Costs:
    """What is known of the pictures by their sizes alone."""
    return Costs(
        batch_size=config.batch_size,
        num_pictures=len(images),
        decoded_bytes=decoded_bytes(images.size_wh_N2, config.size),
        epochs=config.epochs,
    )


def measure(images: ImageSet, config: InputConfig, asked: Asked, network: nn.Module, *, graphs: bool) -> Measured:
    """What a picture and a step cost."""
    step_ms, main_cpu_ms = step_costs(network, config, graph=graphs)
    steps = config.epochs * max(1, len(images) // (config.batch_size * config.world.size))
    budget_s = measuring_budget_s(steps * step_ms / 1e3) / 2
    decode_ms, augment_ms, draw_ms = picture_costs(images, config, asked, budget_s=budget_s)
    return Measured(
        step_ms=step_ms,
        main_cpu_ms=main_cpu_ms,
        decode_ms=decode_ms,
        augment_ms=augment_ms,
        draw_ms=draw_ms,
        render_ms=config.batch_size * config.size**2 / 1e9 * RENDER_MS_PER_GPX,
    )


def measuring_budget_s(run_s: float) -> float:
    """How long measuring may take, of a run of this estimated length."""
    return min(LONGEST_S, SHARE_OF_RUN * run_s)


# What a picture and a step of a training cost, from a few pictures and made-up steps before it begins.
#
# The network is left as it was, and no random number is drawn.

PICTURES = 8
"""Augmented at a time; measuring goes on until the budget is used or enough were seen."""
ENOUGH = 64
LONGEST_STEP_S = 5.0
"""On a CPU, a network so slow that its first step takes longer is judged by that."""
PICTURES_OF_A_STEP = 2
"""On a CPU, where the time of a step grows with its pictures."""


def picture_costs(
    images: ImageSet, config: InputConfig, asked: Asked, *, budget_s: float
) -> tuple[float, float, float]:  # fmt: skip
    """Milliseconds of one core per picture: decoding, augmenting, and the drawing of its numbers."""
    pictures = ResizedImages(images, size=config.size, augment=True, shrunk=asked.shrinks)
    source = TrainingSource(
        images,
        pictures,
        config.applied_augment,
        size=config.size,
        painter="fast" if asked.decodes_once else "classic",
        class_aware=config.class_aware,
    )
    plan = Plan(num_samples=len(images), batch_size=min(PICTURES, len(images)), seed=config.seed)
    seen, began = 0, time.perf_counter()
    with Feed(source, plan, FeedConfig(workers=0, slots=2, on_error="substitute")) as feed:
        batches = iter(feed)
        next(batches)  # loads libraries, and the first files
        feed.meter.restart()
        for batch in batches:
            seen += len(batch)
            if seen >= ENOUGH or time.perf_counter() - began > budget_s:
                break
        stages = {name: spent.total_ns / 1e6 for name, spent in feed.meter.read().stages.items()}
    seen = max(seen, 1)
    decode_ms = stages.get("decode", 0.0) + stages.get("resize", 0.0)
    return decode_ms / seen, max(0.0, stages.get("read", 0.0) - decode_ms) / seen, stages.get("draw", 0.0) / seen


class StepCosts(NamedTuple):
    """Milliseconds of forward and backward: on the clock, and of all cores together."""

    wall_ms: float
    cpu_ms: float


def step_costs(network: nn.Module, config: InputConfig, *, graph: bool) -> StepCosts:
    """Of a batch of black pictures; leaves the network as it was. `graph`: as if launching cost nothing.

    Host-device wait, before the training begins.
    """
    on_device = config.device.type == "cuda"
    num = config.batch_size if on_device else min(config.batch_size, PICTURES_OF_A_STEP)
    with _kept_as_it_is(network):
        while True:
            try:
                costs = _step_costs(network, config, num, graph=graph)
                break
            except torch.OutOfMemoryError:
                if num == 1:
                    raise
                num //= 2  # the training says what to do about it, if it has no room either
    if on_device:
        torch.cuda.empty_cache()  # how many pictures are kept on the device depends on what is free
    scale = config.batch_size / num
    return StepCosts(costs.wall_ms * scale, costs.cpu_ms * scale)


def _step_costs(network: nn.Module, config: InputConfig, num: int, *, graph: bool) -> StepCosts:
    on_device = config.device.type == "cuda"
    pictures = torch.zeros(num, 3, config.size, config.size, device=config.device)
    began, times = time.perf_counter(), []
    for _ in range(3 if on_device else 2):
        times.append(_timed_step(network, config, pictures))
        # A first step on a device compiles kernels, which tells nothing of the next.
        if not on_device and time.perf_counter() - began > LONGEST_STEP_S:
            break
    wall_ms, cpu_ms = times[-1]
    if not graph:
        return times[-1]
    trace = DeviceTrace()
    trace.start()
    _timed_step(network, config, pictures)
    # Without the right to look at the device, nothing is seen of its kernels.
    device_ms = trace.stop(1).busy_ms or wall_ms
    return StepCosts(device_ms, min(cpu_ms, device_ms))


def _timed_step(network: nn.Module, config: InputConfig, pictures: Tensor) -> StepCosts:
    began, began_cpu = time.perf_counter(), time.process_time()
    with torch.autocast(config.device.type, config.dtype, enabled=config.dtype != torch.float32):
        loss = torch.stack([tensor.float().mean() for tensor in _tensors(network(pictures))]).sum()
    loss.backward()
    if config.device.type == "cuda":
        torch.cuda.synchronize(config.device)
    return StepCosts(1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - began_cpu))


@contextmanager
def _kept_as_it_is(network: nn.Module) -> Iterator[None]:
    """Train in the block as ever; running statistics, gradients and mode are put back."""
    was_training, kept = network.training, [buffer.clone() for buffer in network.buffers()]
    network.train()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(network.buffers(), kept, strict=True):
                buffer.copy_(before)
        for parameter in network.parameters():
            parameter.grad = None
        network.train(was_training)


def _tensors(output: object) -> Iterator[Tensor]:
    """All of them that can be differentiated, however deep."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors(part)


# What was measured before.


class Tunings:
    """Measurements of earlier runs, in one file. What cannot be read counts as nothing remembered."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def recall(self, facts: Mapping[str, str]) -> Situation | None:
        """What was found under the same facts, if anything."""
        found = self._read().get(fingerprint(facts))
        try:
            situation = Situation.of(found["situation"] if isinstance(found, dict) else None)
        except (ConfigError, KeyError):
            return None
        return situation if situation.is_plausible else None

    def remember(self, facts: Mapping[str, str], situation: Situation) -> None:
        """Readers see the file before or after, never half of it."""
        content = self._read() | {fingerprint(facts): {"facts": dict(facts), "situation": situation.plain()}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: where several machines or containers share a home, their processes have the same numbers.
        handle, name = tempfile.mkstemp(prefix=f"{self._file.name}.", dir=self._file.parent)
        try:
            with open(handle, "w") as file:
                file.write(json.dumps(content, indent=1))
            os.replace(name, self._file)
        except BaseException:
            os.unlink(name)
            raise

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._file.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def fingerprint(facts: Mapping[str, str]) -> str:
    """Of machine, versions and data: one that differs makes a measurement unknown."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:16]
