"""Autotuning of the input: measure what a sample and a step cost on this machine, and choose by it.

    a few samples read and augmented, a step on blank images  -->  Costs  --choose_input-->  choices

`--fast` leaves open where and how images are kept, whether workers or the device augment them, and how many workers
there are (at most `--workers`); `--workers auto` by itself only the last. Measuring takes a second or two; at most a
twentieth of the run goes into samples beyond the first sixteen. The result is cached together with everything that it
depends on. Runs that are too short for this are not measured: a fixed rule decides then.
"""

import hashlib
import importlib.util
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from flatout.clock import machine
from flatout.config import build_config
from flatout.errors import ConfigError, ResourceError
from flatout.feed import Feed, FeedConfig, Plan, default_folder
from flatout.profiler import DeviceTrace, machine_facts
from flatout.safefiles import read_note, reason_of, write_file
from flatout.yolo.augment.layout import decoded_bytes
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.augment.source import TrainingSource
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.tile_set import TileSet
from flatout.yolo.train.choose_input import (
    Asked,
    Choice,
    Costs,
    Machine,
    Measured,
    choose_input,
    depends_on_measurement,
    describe_rule,
    most_workers,
    remark_on_gpu_decode,
    required_location,
)
from flatout.yolo.train.input import InputConfig

logger = logging.getLogger(__name__)

RENDER_MS_PER_GPX = 50.0
"""Augmenting on the device: 384 images of 320 px in 2 ms, complete (bench/results/augment_gpu_h200_202611.md)."""
LONG_RUN_PIXELS = {"cuda": 1e11, "cpu": 1e8}
"""Pixels shown to the network in a run that is long enough to measure: 10,000 images of 320 px for a hundred epochs on
a GPU, a thousand once on a CPU."""
LONGEST_S, SHARE_OF_RUN = 60.0, 0.05
"""The longest time that measuring may take, in seconds and as a share of the run."""
CACHE_FILE = "tunings.json"
MAX_CORES = 1 << 16
"""Cached measurements with more cores are taken for damaged."""


@dataclass(frozen=True)
class TuningInputs:
    """Machine and costs as the first rank found them: with the command, all that a choice depends on."""

    machine: Machine
    costs: Costs

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """The inverse of `asdict`; ConfigError for anything else."""
        return build_config(plain, cls, where="situation")

    @property
    def is_plausible(self) -> bool:
        """Whether these numbers can have been measured."""
        measured = {} if self.costs.measured is None else asdict(self.costs.measured)
        numbers = {**asdict(self.machine), **asdict(self.costs), **measured}
        found = [value for value in numbers.values() if isinstance(value, int | float)]
        return self.machine.cores <= MAX_CORES and all(0 <= value < math.inf for value in found)


def input_choices(
    images: ImageSet,
    config: InputConfig,
    asked: Asked,
    network: nn.Module,
    *,
    graphs: bool = False,
    file: Path | None = None,
) -> tuple[Choice, ...]:
    """Ways to run the input, best first; all ranks use the machine and the measurement of the first.

    `graphs`: steps are replayed as CUDA graphs. `file` is the cache of measurements.
    """
    if isinstance(images, TileSet):
        # Tiles are cut from whole images in a store: nothing is decoded small or by the GPU, and nothing is measured.
        if asked.gpu_decode and config.world.is_first:
            logger.warning("--gpu-decode has no effect: tiles are cut from images that the CPU decodes.")
        asked = replace(asked, scaled_decode=False, gpu_decode=False)
        return choose_input(asked, this_machine(config), unmeasured(images, config))
    inputs, is_first = TuningInputs(this_machine(config), unmeasured(images, config)), config.world.is_first
    if asked.leaves_choice:
        if is_first:
            cache = TuningCache(file or default_folder().parent / CACHE_FILE)
            inputs = _tuned(inputs, images, config, asked, network, cache, graphs)
        inputs = TuningInputs.from_plain(config.world.broadcast(asdict(inputs)))
    choices = choose_input(asked, inputs.machine, inputs.costs)
    if is_first:
        _log_choices(asked, inputs, choices)
    return choices


def _log_choices(asked: Asked, inputs: TuningInputs, choices: tuple[Choice, ...]) -> None:
    if inputs.costs.measured is None and depends_on_measurement(asked, gpu=inputs.machine.has_gpu):
        logger.info("%s", describe_rule(asked, choices[0]))
    if asked.fast:
        for number, choice in enumerate(choices, 1):
            logger.info("--fast, choice %d: %s.", number, choice)
    remark = remark_on_gpu_decode(asked, inputs.machine, inputs.costs, choices[0])
    if remark and (asked.fast or asked.gpu_decode):
        logger.log(logging.WARNING if asked.gpu_decode else logging.INFO, "%s", remark)


def _tuned(
    here: TuningInputs, images: ImageSet, config: InputConfig, asked: Asked, network: nn.Module, cache: "TuningCache",
    graphs: bool,
) -> TuningInputs:  # fmt: skip
    """With measured costs, perhaps cached ones; `here` itself if the run is short or no choice depends on them."""
    on_gpu = config.device.type == "cuda"
    if not (depends_on_measurement(asked, gpu=on_gpu) and is_long(images, config)):
        return here
    graphs = graphs and on_gpu and config.world.size == 1
    facts = machine_facts() | {
        "asked": f"{asked.flag}, {required_location(asked) or 'any place'}, 4:2:0 {asked.store_420}"
        + ("" if asked.device_augment is not False else ", not on the device"),
        "device": str(config.device),
        # With the folder: the same number of images and pixels may come from a slower disk.
        "data": f"{len(images)} pictures, {int(images.size_wh_N2.sum())}, {Path(images.paths[0]).parent}",
        "input": f"{config.size} px, batch {config.batch_size}, {config.augment}",
        "network": f"{sum(parameter.numel() for parameter in network.parameters())} parameters",
        "run": "several epochs" if config.epochs > 1 else "one epoch",
        "ranks": str(config.world.size),
        "workers": f"{most_workers(asked, here.machine, here.costs)} at most",
        "graphs": str(graphs),
    }
    if (known := cache.load(facts)) is not None:
        logger.info("%s, from an earlier measurement: %s.", asked.flag, _expected(asked, known))
        return known
    began = time.perf_counter()
    measured = measure(images, config, asked, network, graphs=graphs)
    # Read again: a step has allocated memory.
    found = TuningInputs(this_machine(config), replace(here.costs, measured=measured))
    logger.info("%s, measured in %.1f s: %s.", asked.flag, time.perf_counter() - began, _expected(asked, found))
    try:
        cache.save(facts, found)
    except (OSError, ResourceError) as error:
        logger.info("The measurement cannot be cached: %s.", reason_of(error))
    return found


def _expected(asked: Asked, inputs: TuningInputs) -> str:
    first = choose_input(asked, inputs.machine, inputs.costs)[0]
    return f"{first.what}: {first.img_s:,.0f} img/s expected"


def is_long(images: ImageSet, config: InputConfig) -> bool:
    """Whether measuring would be a small part of the run."""
    return config.epochs * len(images) * config.size**2 > LONG_RUN_PIXELS.get(config.device.type, 0.0)


def this_machine(config: InputConfig) -> Machine:
    """The resources of this rank."""
    on_gpu = config.device.type == "cuda"
    return Machine(
        cores=machine.cores().usable,
        ram_free_bytes=machine.memory().free,
        gpu_free_bytes=torch.cuda.mem_get_info(config.device)[0] if on_gpu else None,
        nvjpeg=on_gpu and importlib.util.find_spec("torchvision") is not None,
        ranks_here=config.world.ranks_here,
    )


def unmeasured(images: ImageSet, config: InputConfig) -> Costs:
    """Costs that follow from the sizes of the images alone."""
    return Costs(
        batch_size=config.batch_size,
        num_pictures=len(images),
        decoded_bytes=decoded_bytes(images.size_wh_N2, config.size),
        epochs=config.epochs,
    )


def measure(images: ImageSet, config: InputConfig, asked: Asked, network: nn.Module, *, graphs: bool) -> Measured:
    """Measure the costs of a sample and of a step."""
    step_ms, main_cpu_ms = step_costs(network, config, graph=graphs)
    steps = config.epochs * max(1, len(images) // (config.batch_size * config.world.size))
    budget_s = measuring_budget_s(steps * step_ms / 1e3) / 2
    decode_ms, augment_ms, draw_ms = sample_costs(images, config, asked, budget_s=budget_s)
    return Measured(
        step_ms=step_ms,
        main_cpu_ms=main_cpu_ms,
        decode_ms=decode_ms,
        augment_ms=augment_ms,
        draw_ms=draw_ms,
        render_ms=config.batch_size * config.size**2 / 1e9 * RENDER_MS_PER_GPX,
    )


def measuring_budget_s(run_s: float) -> float:
    """How long measuring may take in a run of this estimated length."""
    return min(LONGEST_S, SHARE_OF_RUN * run_s)


# Measuring. The network and the random state are left as they were.

SAMPLES_PER_BATCH = 8
"""Samples read at a time; measuring stops when the budget is used or ENOUGH samples were read."""
ENOUGH = 64
LONGEST_STEP_S = 5.0
"""On a CPU, if the first step takes longer than this, its time counts and no further step is timed."""
CPU_STEP_IMAGES = 2
"""Images of a measured step on a CPU, where the time of a step grows in proportion."""


def sample_costs(
    images: ImageSet, config: InputConfig, asked: Asked, *, budget_s: float
) -> tuple[float, float, float]:  # fmt: skip
    """Milliseconds of one core per sample: decoding, augmenting, drawing parameters."""
    resized = ResizedImages(images, size=config.size, augment=True, shrunk=asked.shrinks)
    source = TrainingSource(
        images,
        resized,
        config.applied_augment,
        size=config.size,
        class_aware=config.class_aware,
    )
    plan = Plan(num_samples=len(images), batch_size=min(SAMPLES_PER_BATCH, len(images)), seed=config.seed)
    seen, began = 0, time.perf_counter()
    with Feed(source, plan, FeedConfig(workers=0, slots=2, on_error="substitute")) as feed:
        batches = iter(feed)
        next(batches)  # loads libraries and the first files
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
    """Milliseconds of forward and backward."""

    wall_ms: float
    cpu_ms: float
    """CPU time of all cores together."""


def step_costs(network: nn.Module, config: InputConfig, *, graph: bool) -> StepCosts:
    """The costs of a step on a batch of black images; leaves the network as it was.

    `graph`: count kernels only, as if launching them took no time. The host waits for the device here.
    """
    on_device = config.device.type == "cuda"
    num = config.batch_size if on_device else min(config.batch_size, CPU_STEP_IMAGES)
    with _state_restored(network):
        while True:
            try:
                costs = _step_costs(network, config, num, graph=graph)
                break
            except torch.OutOfMemoryError:
                if num == 1:
                    raise
                num //= 2  # if the training runs out of memory, too, its own error says what to do
    if on_device:
        torch.cuda.empty_cache()  # the memory for images on the device depends on what is free
    scale = config.batch_size / num
    return StepCosts(costs.wall_ms * scale, costs.cpu_ms * scale)


def _step_costs(network: nn.Module, config: InputConfig, num: int, *, graph: bool) -> StepCosts:
    on_device = config.device.type == "cuda"
    images = torch.zeros(num, 3, config.size, config.size, device=config.device)
    began = time.perf_counter()
    for _ in range(3 if on_device else 2):
        costs = _timed_step(network, config, images)
        # The first step on a device compiles kernels, so its time says nothing about the next.
        if not on_device and time.perf_counter() - began > LONGEST_STEP_S:
            break
    if not graph:
        return costs
    trace = DeviceTrace()
    _timed_step(network, config, images)
    # The trace is empty if this process may not profile the device.
    device_ms = trace.stop(1).busy_ms or costs.wall_ms
    return StepCosts(device_ms, min(costs.cpu_ms, device_ms))


def _timed_step(network: nn.Module, config: InputConfig, images: Tensor) -> StepCosts:
    began, began_cpu = time.perf_counter(), time.process_time()
    with torch.autocast(config.device.type, config.dtype, enabled=config.dtype != torch.float32):
        loss = torch.stack([tensor.float().mean() for tensor in _tensors(network(images))]).sum()
    loss.backward()
    if config.device.type == "cuda":
        torch.cuda.synchronize(config.device)
    return StepCosts(1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - began_cpu))


@contextmanager
def _state_restored(network: nn.Module) -> Iterator[None]:
    """Put the network into training mode for the block; restore running statistics, gradients and mode after it."""
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
    """All differentiable tensors in nested lists and tuples."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors(part)


# Cache


class TuningCache:
    """Measurements of earlier runs in one file. A file that cannot be read counts as empty."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self, facts: Mapping[str, str]) -> TuningInputs | None:
        """The measurement made under the same facts; None if there is none, or only a damaged one."""
        found = read_note(self._file).get(fingerprint(facts))
        try:
            inputs = TuningInputs.from_plain(found["situation"] if isinstance(found, dict) else None)
        except (ConfigError, KeyError):
            return None
        return inputs if inputs.is_plausible else None

    def save(self, facts: Mapping[str, str], inputs: TuningInputs) -> None:
        """Add a measurement; `facts` identify it.

        The file is replaced as a whole, so that readers never see half of it. Raises OSError. Of two processes that
        save at once, one measurement may be lost.
        """
        content = read_note(self._file) | {fingerprint(facts): {"facts": dict(facts), "situation": asdict(inputs)}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._file, json.dumps(content, indent=1))


def fingerprint(facts: Mapping[str, str]) -> str:
    """A digest of the facts that a measurement depends on: machine, versions, data, network."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:16]
