"""The spike training as `flatout profile` runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from flatout.runs import FILES, MANY_EPOCHS, Decoding, ProfiledTraining, Switch
from flatout.spike.commands.arguments import VERDICT_FLAGS
from flatout.spike.config import SpikeConfig, load_config
from flatout.spike.options import TrainOptions


@dataclass(frozen=True)
class SpikeTraining(ProfiledTraining):
    """A profiled spike training; what the report calls an image is a clip."""

    options: TrainOptions

    @cached_property
    def config(self) -> SpikeConfig:
        return load_config(self.options.config, self.options.set)

    @property
    def title(self) -> str:
        data, name = self.config.DATA, Path(self.options.config).stem
        return f"{name}, clips of {data.CLIP_LEN}, crop {data.CROP_SIZE}, {self.images_per_step} a step"

    def with_switch(self, switch: Mapping[str, Any]) -> Self:
        keys = (f"{key}={value}" for key, value in switch.items())
        return replace(self, options=replace(self.options, set=(*self.options.set, *keys)))

    def network_switches(self) -> Mapping[str, Switch]:
        import torch

        config, found = self.config, dict[str, Switch]()
        if not config.MODEL.CHANNELS_LAST:
            found["channels_last"] = _set("MODEL.CHANNELS_LAST")
        if torch.cuda.is_available() and config.TRAIN.AMP == "off":
            found["half precision"] = _set("TRAIN.AMP", "auto")
        return found

    def own_switch(self, switch: Mapping[str, Any]) -> Switch | None:
        config = self.config
        if "workers" in switch:
            return _set("DATALOADER.TRAIN_WORKERS", switch["workers"])
        if "cache_images" in switch and not config.DATA.USE_RAM_CACHE:
            return _set("DATA.USE_RAM_CACHE")
        if "device_augment" in switch and not config.TRAIN.DEVICE_RESIDENT:
            return _set("TRAIN.DEVICE_RESIDENT")
        return None

    def own_flags(self) -> Mapping[str, str]:
        return VERDICT_FLAGS

    def decoding(self) -> Decoding:
        from flatout.spike.data.clip_set import open_training
        from flatout.spike.data.frames import read_frame

        clips, _ = open_training(self.config.DATA)
        return Decoding(read_frame, [frame.blur for frame in clips.frames[:FILES]])

    def brief(self, folder: Path, num_steps: int) -> Any:
        train = replace(self.config.TRAIN, EPOCHS=MANY_EPOCHS, RESUME_FROM_CHECKPOINT=False)
        return replace(
            self.briefly(folder, num_steps), settings=replace(self.config, TRAIN=train), validate=False
        )  # fmt: skip


def _set(key: str, value: object = "true") -> Switch:
    return Switch(f"--set {key}={value}", {key: value})
