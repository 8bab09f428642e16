"""How the input of a `--fast` training runs: measured on this machine, with these pictures and this network.

    a few pictures read and augmented here, a step on made-up pictures  -->  Costs  --choose-->  store, device, workers

A second or two, and no more than a twentieth of the run goes into pictures beyond the first sixteen; what was chosen is
remembered beside what it depends on. Short runs on a GPU are not measured at all: there the pictures are kept and
augmented on the device.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.feed import Feed, FeedConfig, Plan
from flatout.feed.store.home import default_folder
from flatout.profiler import machine
from flatout.profiler.device_trace import DeviceTrace
from flatout.profiler.summary import machine_facts
from flatout.profiler.tuning import Choice, Costs, Tunings, choose, measuring_budget_s
from flatout.yolo.augment.pictures import ResizedPictures
from flatout.yolo.augment.source import TrainingSource
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.options import TrainOptions
from flatout.yolo.train.input import InputConfig, num_workers

logger = logging.getLogger(__name__)

PICTURES = 8
"""Augmented at a time; measuring goes on until the budget is used or enough were seen."""
ENOUGH = 64
LONGEST_STEP_S = 5.0
"""On a CPU, a network so slow that its first step takes longer is judged by that."""
PICTURES_OF_A_STEP = 2
"""On a CPU, where the time of a step grows with its pictures."""
RENDER_MS_PER_GPX = 50.0
"""Augmenting on the device: 384 pictures of 320 px in 2 ms, complete (bench/results/augment_gpu_h200_202611.md)."""
FEWEST_SLOTS = 4
TUNINGS = "tunings.json"


def tuned(
    images: ImageSet, config: InputConfig, options: TrainOptions, network: nn.Module, *, file: Path | None = None
) -> tuple[InputConfig, TrainOptions]:
    """The input as it is fastest here; all ranks follow the first one's measurement."""
    tunings = Tunings(file or default_folder().parent / TUNINGS)
    found = _choice(images, config, options, network, tunings) if config.world.is_first else None
    choice = Choice(**config.world.from_first(asdict(found) if found is not None else None))
    if choice.augment_on_device:  # two workers, who also move the boxes, are enough for any GPU
        return config, replace(options, device_augment=True)
    return (
        replace(config, keeps=choice.keep != "off", slots=max(choice.slots, FEWEST_SLOTS)),
        replace(options, workers=choice.workers, device_augment=False),
    )


def _choice(
    images: ImageSet, config: InputConfig, options: TrainOptions, network: nn.Module, tunings: Tunings
) -> Choice:
    most_workers = num_workers(options.workers, config.batch_size, config.world)
    facts = machine_facts() | {
        "device": str(config.device),
        "data": f"{len(images)} pictures, {int(images.size_wh_N2.sum())}",
        "input": f"{config.size} px, batch {config.batch_size}, {config.augment}",
        "network": f"{sum(parameter.numel() for parameter in network.parameters())} parameters",
        "run": "several epochs" if config.epochs > 1 else "one epoch",
        "ranks": str(config.world.size),
        "workers": f"{most_workers} at most",
        "graphs": str(as_graph(config, options)),
    }
    if (known := tunings.recall(facts)) is not None:
        logger.info("--fast, as measured before: %s.", known.reason)
        return known
    began = time.perf_counter()
    choice = choose(measure_costs(images, config, options, network))
    logger.info("--fast, measured in %.1f s: %s.", time.perf_counter() - began, choice.reason)
    try:
        tunings.remember(facts, choice)
    except OSError as error:
        logger.info("The choice is not remembered: %s.", error.strerror)
    return choice


def as_graph(config: InputConfig, options: TrainOptions) -> bool:
    """Will steps be replayed as CUDA graphs? Then what counts is how long kernels run, not how long launching takes."""
    return config.device.type == "cuda" and config.world.size == 1 and not options.multi_scale


def measure_costs(images: ImageSet, config: InputConfig, options: TrainOptions, network: nn.Module) -> Costs:
    """What a picture and a step cost."""
    step_ms, main_cpu_ms = step_costs(network, config, graph=as_graph(config, options))
    steps = config.epochs * max(1, len(images) // (config.batch_size * config.world.size))
    budget_s = measuring_budget_s(steps * step_ms / 1e3) / 2
    decode_ms, augment_ms, draw_ms = picture_costs(images, config, budget_s=budget_s)
    free, on_device = machine.memory().free, config.device.type == "cuda"
    return Costs(
        images=config.batch_size,
        step_ms=step_ms,
        main_cpu_ms=main_cpu_ms,
        decode_ms=decode_ms,
        augment_ms=augment_ms,
        draw_ms=draw_ms,
        cores=max(1.0, machine.cores().usable / config.world.size),
        most_workers=num_workers(options.workers, config.batch_size, config.world),
        decoded_bytes=decoded_bytes(images, config.size),
        ram_free_bytes=free,
        # What does not fit into device memory is read from pinned memory, beside the step.
        device_free_bytes=torch.cuda.mem_get_info(config.device)[0] + free if on_device else 0,
        render_ms=config.batch_size * config.size**2 / 1e9 * RENDER_MS_PER_GPX if on_device else None,
        epochs=config.epochs,
    )


def decoded_bytes(images: ImageSet, size: int) -> int:
    """Of all pictures, their longer side as long as the input's."""
    longer_N = images.size_wh_N2.max(1).clip(1)
    return int((3 * images.size_wh_N2.prod(1) * (size / longer_N) ** 2).sum())


def picture_costs(images: ImageSet, config: InputConfig, *, budget_s: float) -> tuple[float, float, float]:
    """Milliseconds of one core per picture: decoding, augmenting, and the drawing of its numbers."""
    pictures = ResizedPictures(images, size=config.size, augment=True, shrunk=True)
    source = TrainingSource(
        images, pictures, config.augment, size=config.size, painter="fast", class_aware=config.class_aware
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
