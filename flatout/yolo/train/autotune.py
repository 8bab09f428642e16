"""How the input of a training runs that leaves it to us: measured on this machine, with these pictures and network.

    a few pictures read and augmented here, a step on made-up pictures  -->  Costs  --choose-->  store, device, workers

`--fast` leaves open where and how pictures are kept, who augments them and how many workers there are (at most
`--workers` of them); `--workers auto` by itself only the last. A second or two, and no more than a twentieth of the run
goes into pictures beyond the first sixteen; what was chosen is remembered beside what it depends on. Runs so short that
this would be more than a twentieth of them are not measured: what holds for `--fast` and `auto` then is a fixed rule.
"""

import logging
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from flatout.feed.store.home import default_folder
from flatout.profiler import machine
from flatout.profiler.summary import machine_facts
from flatout.profiler.tuning import Choice, Costs, Place, Tunings, choose, measuring_budget_s
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.options import AUTO, TrainOptions
from flatout.yolo.train.input import InputConfig, num_workers
from flatout.yolo.train.input_costs import decoded_bytes, picture_costs, step_costs

logger = logging.getLogger(__name__)

RENDER_MS_PER_GPX = 50.0
"""Augmenting on the device: 384 pictures of 320 px in 2 ms, complete (bench/results/augment_gpu_h200_202611.md)."""
LONG_RUN_PIXELS = {"cuda": 1e11, "cpu": 1e8}
"""Pixels that the network is shown in a run worth measuring: 10,000 pictures of 320 px for a hundred epochs on a GPU,
a thousand once on a CPU."""
FEWEST_SLOTS = 4
TUNINGS = "tunings.json"


def is_left_to_us(options: TrainOptions) -> bool:
    """Whether anything about the input is for us to choose. Workers that only draw numbers are two on any machine."""
    if options.device_augment:  # by --fast alone, or because the command says so: then nothing is left open
        return options.fast and not options.no_fast_dataloader
    return options.fast or options.workers == AUTO


def is_worth_measuring(images: ImageSet, config: InputConfig) -> bool:
    """Whether the run is so long that measuring is a small part of it."""
    return config.epochs * len(images) * config.size**2 > LONG_RUN_PIXELS.get(config.device.type, 0.0)


def fixed_rule(config: InputConfig, options: TrainOptions) -> str:
    """What holds where nothing is measured, in one line."""
    workers = num_workers(options.workers, config.batch_size, config.world)
    if options.device_augment:
        return f"{_asked(options)}, too short a run to measure: pictures are kept and augmented on the device."
    rule = " (80 % of the cores, no more than pictures of a batch)" if options.workers == AUTO else ""
    return f"{_asked(options)}, too short a run to measure: {workers} worker{'' if workers == 1 else 's'}{rule}."


def _asked(options: TrainOptions) -> str:
    return "--fast" if options.fast else "--workers auto"


def tuned(
    images: ImageSet, config: InputConfig, options: TrainOptions, network: nn.Module, *, file: Path | None = None
) -> tuple[InputConfig, TrainOptions]:
    """The input as it is fastest here; all ranks follow the first one's measurement."""
    tunings = Tunings(file or default_folder().parent / TUNINGS)
    found = _choice(images, config, options, network, tunings) if config.world.is_first else None
    choice = Choice(**config.world.from_first(asdict(found) if found is not None else None))
    if choice.augment_on_device:  # two workers, who also move the boxes, are enough for any GPU
        return config, replace(options, device_augment=True, store_420=choice.format == "4:2:0")
    return (
        replace(config, keeps=choice.keep != "off", slots=max(choice.slots, FEWEST_SLOTS)),
        replace(options, workers=choice.workers, device_augment=False, store_420=False),
    )


def _choice(
    images: ImageSet, config: InputConfig, options: TrainOptions, network: nn.Module, tunings: Tunings
) -> Choice:
    facts = machine_facts() | {
        "asked": f"{_asked(options)}, {place_given(options) or 'any place'}, 4:2:0 {options.store_420}"
        + ("" if not options.no_device_augment else ", not on the device"),
        "device": str(config.device),
        # Where they lie, too: the same numbers of pictures and pixels may come from a slower disk.
        "data": f"{len(images)} pictures, {int(images.size_wh_N2.sum())}, {Path(images.paths[0]).parent}",
        "input": f"{config.size} px, batch {config.batch_size}, {config.augment}",
        "network": f"{sum(parameter.numel() for parameter in network.parameters())} parameters",
        "run": "several epochs" if config.epochs > 1 else "one epoch",
        "ranks": str(config.world.size),
        "workers": f"{most_workers(config, options)} at most",
        "graphs": str(as_graph(config, options)),
    }
    if (known := tunings.recall(facts)) is not None:
        logger.info("%s, as measured before: %s.", _asked(options), known.reason)
        return known
    began = time.perf_counter()
    choice = choose(measure_costs(images, config, options, network))
    logger.info("%s, measured in %.1f s: %s.", _asked(options), time.perf_counter() - began, choice.reason)
    try:
        tunings.remember(facts, choice)
    except OSError as error:
        logger.info("The choice is not remembered: %s.", error.strerror)
    return choice


def most_workers(config: InputConfig, options: TrainOptions) -> int:
    """What `--workers` allows; `auto` allows a worker for every core."""
    asked = machine.cores().usable if options.workers == AUTO else options.workers
    return num_workers(asked, config.batch_size, config.world)


def place_given(options: TrainOptions) -> Place | None:
    """Where pictures have to be kept because the command says so; None: that is for us to choose."""
    if options.fast and not options.no_fast_dataloader:
        return None
    return "ram" if options.cache_images or options.fast_dataloader else "off"


def as_graph(config: InputConfig, options: TrainOptions) -> bool:
    """Will steps be replayed as CUDA graphs? Then what counts is how long kernels run, not how long launching takes."""
    return options.as_graphs and config.device.type == "cuda" and config.world.size == 1


def measure_costs(images: ImageSet, config: InputConfig, options: TrainOptions, network: nn.Module) -> Costs:
    """What a picture and a step cost."""
    step_ms, main_cpu_ms = step_costs(network, config, graph=as_graph(config, options))
    steps = config.epochs * max(1, len(images) // (config.batch_size * config.world.size))
    budget_s = measuring_budget_s(steps * step_ms / 1e3) / 2
    decode_ms, augment_ms, draw_ms = picture_costs(images, config, options, budget_s=budget_s)
    # Without --fast, or with --no-device-augment, whether the device augments is not ours to say.
    on_device = options.fast and not options.no_device_augment and config.device.type == "cuda"
    all_bytes = decoded_bytes(images, config.size)
    return Costs(
        images=config.batch_size,
        step_ms=step_ms,
        main_cpu_ms=main_cpu_ms,
        decode_ms=decode_ms,
        augment_ms=augment_ms,
        draw_ms=draw_ms,
        cores=max(1.0, machine.cores().usable / config.world.size),
        most_workers=most_workers(config, options),
        decoded_bytes=all_bytes,
        picture_bytes=all_bytes / max(1, len(images)),
        ram_free_bytes=machine.memory().free,
        device_free_bytes=torch.cuda.mem_get_info(config.device)[0] if on_device else 0,
        may_subsample=options.store_420,
        place=place_given(options),
        render_ms=config.batch_size * config.size**2 / 1e9 * RENDER_MS_PER_GPX if on_device else None,
        epochs=config.epochs,
    )
