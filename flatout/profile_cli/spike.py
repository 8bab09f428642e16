"""What `flatout spike train` would run, to be looked at."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from flatout.profile_cli.engine_training import FILES, MANY_EPOCHS, Decoding, EngineTraining, Switch
from flatout.spike.commands.train import train_parser
from flatout.spike.config import SpikeConfig, load_config


@dataclass(frozen=True)
class SpikeTraining(EngineTraining):
    """A training on clips; what the report calls an image is a clip."""

    path: str
    """Of the YAML."""
    overrides: tuple[str, ...]
    """As `--set` takes them."""
    device: str

    @classmethod
    def from_flags(cls, flags: list[str], *, num_steps: int) -> "SpikeTraining":
        """Flags as `flatout spike train` takes them."""
        args = train_parser("flatout profile spike").parse_args(flags)
        training = cls(num_steps, args.config, tuple(args.set), args.device)
        assert training.config  # mistakes are told before anything runs
        return training

    @cached_property
    def config(self) -> SpikeConfig:
        return load_config(self.path, self.overrides)

    @property
    def title(self) -> str:
        data = self.config.DATA
        return f"{Path(self.path).stem}, clips of {data.CLIP_LEN}, crop {data.CROP_SIZE}, {self.images_per_step} a step"

    @property
    def images_per_step(self) -> int:
        return self.config.TRAIN.BATCH_SIZE

    def with_switch(self, switch: Mapping[str, Any]) -> Self:
        return replace(self, overrides=(*self.overrides, *(f"{key}={value}" for key, value in switch.items())))

    def network_switches(self) -> Mapping[str, Switch]:
        import torch

        config, found = self.config, dict[str, Switch]()
        if not config.MODEL.CHANNELS_LAST:
            found["channels_last"] = _set(**{"MODEL.CHANNELS_LAST": "true"})
        if torch.cuda.is_available() and config.TRAIN.AMP == "off":
            found["half precision"] = _set(**{"TRAIN.AMP": "auto"})
        return found

    def own_switch(self, switch: Mapping[str, Any]) -> Switch | None:
        config = self.config
        if "workers" in switch:
            return _set(**{"DATALOADER.TRAIN_WORKERS": switch["workers"]})
        if "cache_images" in switch and not config.DATA.USE_RAM_CACHE:
            return _set(**{"DATA.USE_RAM_CACHE": "true"})
        if "device_augment" in switch and not config.TRAIN.DEVICE_RESIDENT:
            return _set(**{"TRAIN.DEVICE_RESIDENT": "true"})
        return None

    def own_flags(self) -> Mapping[str, str]:
        from flatout.spike.commands.arguments import VERDICT_FLAGS

        return VERDICT_FLAGS

    def decoding(self) -> Decoding:
        from flatout.spike.data import open_training
        from flatout.spike.frames import read_image

        clips, _ = open_training(self.config.DATA)
        return Decoding(read_image, [frame.blur for frame in clips.frames[:FILES]])

    def run(self, folder: Path, num_steps: int) -> None:
        from flatout.spike.train import TrainOptions, train

        config = self.config
        short = replace(
            config,
            LOG=replace(config.LOG, SAVE_DIR=str(folder / "run"), PROGRESS_EVERY_STEPS=num_steps),
            TRAIN=replace(config.TRAIN, EPOCHS=MANY_EPOCHS, RESUME_FROM_CHECKPOINT=False),
        )
        options = TrainOptions(
            device=self.device, fresh=True, stop_after=num_steps, validate=False, log_to=("none",), no_preflight=True
        )
        train(short, options)


def _set(**keys: Any) -> Switch:
    return Switch(" ".join(f"--set {key}={value}" for key, value in keys.items()), keys)
