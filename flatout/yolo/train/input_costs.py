"""What a picture and a step of a training cost, from a few pictures and made-up steps before it begins.

The network is left as it was, and no random number is drawn.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatout.feed import Feed, FeedConfig, Plan
from flatout.profiler.device_trace import DeviceTrace
from flatout.yolo.augment.pictures import ResizedPictures
from flatout.yolo.augment.source import TrainingSource
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.options import TrainOptions
from flatout.yolo.train.input import InputConfig

PICTURES = 8
"""Augmented at a time; measuring goes on until the budget is used or enough were seen."""
ENOUGH = 64
LONGEST_STEP_S = 5.0
"""On a CPU, a network so slow that its first step takes longer is judged by that."""
PICTURES_OF_A_STEP = 2
"""On a CPU, where the time of a step grows with its pictures."""


def decoded_bytes(images: ImageSet, size: int) -> int:
    """Of all pictures, their longer side as long as the input's."""
    longer_N = images.size_wh_N2.max(1).clip(1)
    return int((3 * images.size_wh_N2.prod(1) * (size / longer_N) ** 2).sum())


def picture_costs(
    images: ImageSet, config: InputConfig, options: TrainOptions, *, budget_s: float
) -> tuple[float, float, float]:
    """Milliseconds of one core per picture: decoding, augmenting, and the drawing of its numbers."""
    pictures = ResizedPictures(images, size=config.size, augment=True, shrunk=options.decodes_scaled)
    source = TrainingSource(
        images,
        pictures,
        replace(config.augment, mosaic=0.0) if options.rect else config.augment,
        size=config.size,
        painter="fast" if options.fast_dataloader else "classic",
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
