"""What a command is about: options, hyper-parameters, data file, device and run folder, before anything is built.

Files that cannot be read and options that contradict each other end here, before a folder is made.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.engine import distributed
from flatout.engine.device_choice import choose_devices
from flatout.engine.distributed import World
from flatout.engine.precision import Amp, default_fast_amp
from flatout.engine.preflight import check_descriptors
from flatout.engine.preflight.gpu import check_gpus
from flatout.engine.run_folder import AboutRun, Run, choose_run, finished_run, run_of
from flatout.errors import ConfigError
from flatout.yolo.compat.resume_options import (
    checkpoint_to_resume,
    config_of_run,
    options_to_resume,
    write_options,
)
from flatout.yolo.data.data_yaml import DataSet, without_complaints
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import Hyp, load_hyp
from flatout.yolo.options import TrainOptions

logger = logging.getLogger(__name__)

STATES = ("last.pt", "last.prev.pt")
FIRST_SEED = 2
"""YOLOv7 seeds with 2 + rank, and rank is -1 without DDP."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that is decided before the data is looked at."""

    options: TrainOptions
    """Resolved: what shortcuts stand for is switched on."""
    written: TrainOptions
    """As typed: what opt.yaml holds."""
    hyp: Hyp
    data: DataSet
    world: World
    device: torch.device
    resume: Path | None
    """A checkpoint that --resume names."""

    @property
    def amp(self) -> Amp:
        """As asked; else YOLOv7's float16 on a GPU."""
        if self.options.amp is not None:
            return self.options.amp
        return "fp16" if self.device.type == "cuda" else "off"

    @property
    def seed(self) -> int:
        """Of the stream and of the network's first weights, the same on all ranks."""
        if self.options.seed is not None:
            return self.options.seed
        return FIRST_SEED if self.world.size > 1 else FIRST_SEED - 1

    def open_run(self) -> Run:
        """The run folder, locked, with opt.yaml and hyp.yaml in it."""
        run = choose_run(Path(self.written.project), self.written.name, **self._about_run())
        write_options(run.folder, self.written, self.hyp)
        return run

    def finished_run(self) -> Path | None:
        """With `--once`, the run of this command, if it is complete. All ranks ask at the same time."""
        if not self.options.once:
            return None
        project, name = Path(self.written.project), self.written.name
        found = finished_run(project, name, **self._about_run()) if self.world.is_first else None
        told: Path | None = self.world.from_first(found)
        return told

    def _about_run(self) -> AboutRun:
        options = self.written
        return {
            "config": config_of_run(options, self.hyp),
            "exist_ok": options.exist_ok,
            "fresh": options.fresh,
            "resume": self.resume,
            "break_lock": options.break_lock,
        }


def read_setting(options: TrainOptions) -> Setting:
    """From a command's options; those of a resumed run come from its folder."""
    world = distributed.read_world(options.local_rank)
    resume = checkpoint_to_resume(options)
    if resume is not None:
        _check_resumable(resume)
        options, hyp = options_to_resume(options, run_of(resume))
    else:
        hyp = load_hyp(find_file(options.hyp, flag="--hyp"))
        if options.auto_lr:
            hyp = hyp.for_batch(world.share_of(options.batch_size))
    if world.is_first and not options.no_preflight:
        check_gpus(options.device)
    device = _device(options.device, world)
    if world.is_first and not options.no_preflight:
        check_descriptors(uses_gpu=device.type == "cuda")
    fast_amp = default_fast_amp(device)
    resolved = options.resolved(cuda=device.type == "cuda", bf16=fast_amp == "bf16")
    _check(resolved, device)
    data = without_complaints(open_data_set(find_file(options.data, flag="--data")))
    return Setting(options=resolved, written=options, hyp=hyp, data=data, world=world, device=device, resume=resume)


def _check_resumable(path: Path) -> None:
    """A run goes on from its newest state: another file of the run must not be taken for that in silence."""
    if path.is_file() and path.name not in STATES:
        raise ConfigError(
            f"--resume {path}: a run continues from its newest state, last.pt: name that, or the folder of the run. "
            f"To start a new run from this file: --weights {path}"
        )


def _device(text: str, world: World) -> torch.device:
    devices = choose_devices(text)
    if world.size > 1:
        if devices[0].type == "cpu":
            return devices[0]
        if world.local_rank >= len(devices):
            raise ConfigError(f"rank {world.local_rank} of this machine has no GPU: --device names {len(devices)}.")
        return devices[world.local_rank]
    if len(devices) > 1:
        numbers = ",".join(str(device.index) for device in devices)
        logger.warning("%d GPUs are there, one is used. For all of them add: --device %s", len(devices), numbers)
    return devices[0]


def _check(options: TrainOptions, device: torch.device) -> None:
    if options.quad and options.device_augment:
        raise ConfigError("--quad is made of finished pictures on the CPU: leave --device-augment and --fast out.")
    if options.image_weights and options.rect:
        raise ConfigError("--image-weights draws pictures at random, --rect sorts them by shape: use one of them.")
    if options.image_weights and options.quad:
        raise ConfigError("--image-weights and --quad exclude each other in YOLOv7: use one of them.")


def resolved_line(setting: Setting) -> str:
    """What the input and the step are made of, in one line for the log."""
    options = setting.options
    source = "GPU renderer" if options.device_augment else "decode-once store" if options.fast_dataloader else "classic"
    parts = [f"input: {source}", f"amp: {setting.amp}", f"compile: {options.compile}"]
    parts += ["channels_last"] if options.channels_last else []
    return f"{setting.device}, " + ", ".join(parts)
