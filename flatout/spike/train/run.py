"""Where a training runs: its folder, and its device."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
import yaml

from flatout.engine.checkpoint.atomic import replacing
from flatout.engine.device_choice import choose_devices
from flatout.engine.distributed import World
from flatout.engine.run_folder import AboutRun, Run, choose_run, finished_run
from flatout.errors import ConfigError
from flatout.spike.config import SpikeConfig, plain
from flatout.spike.train.options import TrainOptions
from flatout.spike.weight_files import refuse_early

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.yaml"
_NO_MATTER = ("EPOCHS", "TOTAL_STEPS", "RESUME_FROM_CHECKPOINT", "CHECKPOINT_PATH", "DEVICE_RESIDENT", "CUDA_GRAPHS")
"""Of TRAIN: how long is told apart, and where from and how does not change what is learned."""


def config_of_run(config: SpikeConfig, epochs: int) -> dict[str, Any]:
    """What a result depends on, in values that JSON knows: commands with equal ones mean the same run."""
    values = plain(config)
    train = {key: value for key, value in values["TRAIN"].items() if key not in _NO_MATTER}
    kept = {key: values[key] for key in ("DATA", "MODEL", "LOSS", "SEED")}
    of_json: dict[str, Any] = json.loads(json.dumps(kept | {"TRAIN": train}))
    return {"epochs": epochs} | of_json


def complete_run(config: SpikeConfig, options: TrainOptions, epochs: int) -> Path | None:
    """With `--once`, the run of this command, if it is complete."""
    if not options.once:
        return None
    save = Path(config.LOG.SAVE_DIR)
    return finished_run(save.parent, save.name, **_about_run(config, options, epochs))


def open_run(config: SpikeConfig, options: TrainOptions, epochs: int) -> Run:
    save = Path(config.LOG.SAVE_DIR)
    run = choose_run(save.parent, save.name, **_about_run(config, options, epochs))
    content = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True).encode()
    with replacing(run.folder / CONFIG_NAME, needed_bytes=len(content)) as sink:
        sink.write(content)
    return run


def _about_run(config: SpikeConfig, options: TrainOptions, epochs: int) -> AboutRun:
    asked = options.resume or (config.TRAIN.CHECKPOINT_PATH if config.TRAIN.RESUME_FROM_CHECKPOINT else None)
    if config.TRAIN.RESUME_FROM_CHECKPOINT and not asked:
        raise ConfigError("TRAIN.RESUME_FROM_CHECKPOINT is true, but CHECKPOINT_PATH does not say which one.")
    if asked:
        refuse_early(Path(asked))
    return {
        "config": config_of_run(config, epochs),
        "exist_ok": False,
        "fresh": options.fresh,
        "resume": Path(asked) if asked else None,
        "break_lock": options.break_lock,
    }


def choose_device_of(text: str, world: World) -> torch.device:
    devices = choose_devices(text)
    if devices[0].type == "cpu":
        return devices[0]
    if world.local_rank >= len(devices):
        raise ConfigError(f"rank {world.local_rank} of this machine has no GPU: there are {len(devices)}.")
    if world.size == 1 and len(devices) > 1:
        logger.warning(
            "%d GPUs are there, one is used. For all: torchrun --nproc_per_node %d -m flatout spike train ...",
            len(devices), len(devices),
        )  # fmt: skip
    return devices[world.local_rank]
