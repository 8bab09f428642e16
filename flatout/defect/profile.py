"""The defect training as `flatout profile` runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.defect.commands.flags import VERDICT_FLAGS
from flatout.defect.options import TrainOptions
from flatout.runs import FILES, Decoding, ProfiledTraining, Switch


@dataclass(frozen=True)
class DefectTraining(ProfiledTraining):
    """A profiled defect training; what the report calls an image is a patch."""

    options: TrainOptions

    @property
    def title(self) -> str:
        options = self.options
        return f"network {options.network}, {options.patch} px patches, batch {options.bs}"

    def network_switches(self) -> Mapping[str, Switch]:
        import torch

        found: dict[str, Switch] = {}
        if not self.options.channels_last:
            found["channels_last"] = Switch("--channels_last true", {"channels_last": True})
        if torch.cuda.is_available() and self.options.amp == "off":
            found["half precision"] = Switch("--amp auto", {"amp": "auto"})
        return found

    def own_switch(self, switch: Mapping[str, Any]) -> Switch | None:
        if "workers" in switch:
            return Switch(f"--num_workers {switch['workers']}", {"num_workers": switch["workers"]})
        if "cache_images" in switch and self.options.cache_size is not None:
            return Switch("without --cache_size", {"cache_size": None})
        if "device_augment" in switch and self.options.device_strips == "off":
            return Switch("--device_strips on", {"device_strips": "on"})
        return None

    def own_flags(self) -> Mapping[str, str]:
        return VERDICT_FLAGS

    def decoding(self) -> Decoding:
        from flatout.defect.data.items import read_canonical
        from flatout.defect.train import training_images

        strips = training_images(self.options).strips
        files = [strips.path(index) for index in range(min(FILES, len(strips)))]
        return Decoding(lambda path: read_canonical(path).transpose(1, 2, 0), files)

    def brief(self, folder: Path, num_steps: int) -> Any:
        return replace(super().brief(folder, num_steps), checkpoint_path="", use_mask=False)
