"""What `flatout defect train` would run, to be looked at."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from flatout.defect.commands.flags import options_from, parser_for
from flatout.defect.options import TrainOptions
from flatout.profile_cli.engine_training import FILES, MANY_EPOCHS, Decoding, EngineTraining, Switch


@dataclass(frozen=True)
class DefectTraining(EngineTraining):
    """A training on strips; what the report calls an image is a patch."""

    options: TrainOptions

    @classmethod
    def from_flags(cls, flags: list[str], *, num_steps: int) -> "DefectTraining":
        """Flags as `flatout defect train` takes them."""
        parser = parser_for("flatout profile defect", __doc__, "", TrainOptions, hidden=("stop_after",))
        return cls(num_steps, options_from(parser.parse_args(flags), TrainOptions))

    @property
    def title(self) -> str:
        options = self.options
        return f"network {options.network}, {options.patch} px patches, batch {options.bs}"

    @property
    def images_per_step(self) -> int:
        return self.options.bs

    def with_switch(self, switch: Mapping[str, Any]) -> Self:
        return replace(self, options=replace(self.options, **switch))

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
        from flatout.defect.commands.flags import VERDICT_FLAGS

        return VERDICT_FLAGS

    def decoding(self) -> Decoding:
        from flatout.defect.strips.items import read_canonical
        from flatout.defect.train.input import find_images

        strips = find_images(self.options).strips
        files = [strips.path(index) for index in range(min(FILES, len(strips)))]
        return Decoding(lambda path: read_canonical(path).transpose(1, 2, 0), files)

    def run(self, folder: Path, num_steps: int) -> None:
        from flatout.defect.train import train

        train(
            replace(
                self.options,
                checkpoint_path=str(folder),
                name="run",
                epochs=MANY_EPOCHS,
                stop_after=num_steps,
                use_mask=False,
                fresh=True,
                resume="",
                log_every=num_steps,
                log_to=("none",),
                no_preflight=True,
            )
        )
