"""From options and parts to the loop that trains: network, optimizer, schedule, number format, step."""

from typing import Any

import torch
from torch import nn

from flatout.defect.model import DefectNet
from flatout.defect.options import TrainOptions
from flatout.defect.schedule import StepwiseSchedule
from flatout.defect.train.epoch_end import EpochEnd
from flatout.defect.train.input import TrainingInput
from flatout.defect.train.job import DefectJob, StepConfig
from flatout.engine.compiling import Compiled
from flatout.engine.distributed import World
from flatout.engine.loop import Loop, LoopConfig
from flatout.engine.optim import make_optimizer
from flatout.engine.precision import Amp, default_fast_amp

ADAM_BETA = 0.9


def amp_of(options: TrainOptions, device: torch.device) -> Amp:
    return default_fast_amp(device) if options.amp == "auto" else options.amp


def laid_out(network: DefectNet, options: TrainOptions, device: torch.device) -> DefectNet:
    """The network on its device, in the memory format that was asked for."""
    network = network.to(device)
    if options.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def make_loop(
    options: TrainOptions,
    *,
    network: DefectNet,
    source: TrainingInput,
    epoch_end: EpochEnd,
    device: torch.device,
    world: World,
    **watching: Any,
) -> Loop:
    """`network` as `laid_out` gives it; `watching` are those arguments of a loop that no step depends on."""
    step = StepConfig(
        epochs=options.epochs,
        gamma_start=options.gamma_start,
        gamma_end=options.gamma_end,
        alpha_background=options.alpha_background,
        alpha_defect=options.alpha_defect,
        channels_last=options.channels_last,
    )
    parameters = list(network.parameters())
    return Loop(
        job=DefectJob(step, epoch_end),
        network=network,
        optimizer=make_optimizer("adam", [parameters], lr=options.lr, momentum=ADAM_BETA, decays=[0.0]),
        schedule=StepwiseSchedule(options.lr, options.epochs),
        batches=source.batches,
        config=LoopConfig(
            epochs=options.epochs,
            steps_per_epoch=source.steps_per_epoch,
            amp=amp_of(options, device),
            log_every=min(options.log_every, source.steps_per_epoch),
            save_every_s=60 * options.save_every_minutes,
            save_every_steps=options.save_every_steps,
            stop_after=options.stop_after,
            graphs=options.graphs,
        ),
        device=device,
        world=world,
        forward=_forward(network, options, device, world),
        **watching,
    )


def _forward(network: DefectNet, options: TrainOptions, device: torch.device, world: World) -> nn.Module:
    """The network as it is called."""
    if world.size > 1:
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(network, device_ids=ids)
    return Compiled(network) if options.compile == "on" else network
