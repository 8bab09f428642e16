"""What `flatout yolo train` would run, to be looked at."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from flatout.profile_cli.engine_training import FILES, Decoding, EngineTraining, Switch
from flatout.profiler.verdict.rules_device import CUDA_GRAPH
from flatout.profiler.verdict.rules_input import ON_DEVICE
from flatout.yolo.compat.flags import train_options, train_parser
from flatout.yolo.compat.not_built import refuse_what_is_not_built
from flatout.yolo.options import TrainOptions


@dataclass(frozen=True)
class YoloTraining(EngineTraining):
    """A detection training."""

    options: TrainOptions

    @classmethod
    def from_flags(cls, flags: list[str], *, num_steps: int) -> "YoloTraining":
        """Flags as `flatout yolo train` takes them."""
        options = train_options(train_parser("flatout profile yolo").parse_args(flags), os.environ)
        refuse_what_is_not_built(options)
        return cls(num_steps, options)

    @property
    def title(self) -> str:
        options = self.options
        return f"{Path(options.cfg or options.weights).stem}, {options.img_size[0]} px, batch {options.batch_size}"

    @property
    def images_per_step(self) -> int:
        return self.options.batch_size

    def with_switch(self, switch: Mapping[str, Any]) -> Self:
        return replace(self, options=replace(self.options, **switch))

    def network_switches(self) -> Mapping[str, Switch]:
        """On a GPU none by itself: --fast holds them all, and each trial would compile kernels of its own."""
        if self._on_gpu or self.options.channels_last:
            return {}
        return {"channels_last": Switch("--channels-last", {"channels_last": True})}

    def whole_switches(self) -> Mapping[str, Switch]:
        """On a CPU none: network and input share its cores, so that the two by themselves do not tell."""
        if not self._on_gpu or self.options.fast:
            return {}
        covers = (CUDA_GRAPH, ON_DEVICE)
        return {"everything that --fast switches on": Switch("--fast", {"fast": True}, covers=covers)}

    @property
    def _on_gpu(self) -> bool:
        from flatout.engine.device_choice import choose_devices

        return choose_devices(self.options.device)[0].type == "cuda"

    def own_switch(self, switch: Mapping[str, Any]) -> Switch | None:
        """The verdict speaks of these flags by their own names."""
        return Switch(" ".join(map(_flag, switch.items())), switch)

    def decoding(self) -> Decoding:
        from flatout.images import read_picture
        from flatout.yolo.data.data_yaml import open_data_yaml
        from flatout.yolo.data.find import find_images

        return Decoding(read_picture, find_images(open_data_yaml(self.options.data).entries["train"]).paths[:FILES])

    def run(self, folder: Path, num_steps: int) -> None:
        from flatout.profile_cli.unpictured import unpictured
        from flatout.yolo.train import train

        options = replace(
            self.options,
            project=str(folder),
            name="run",
            # As asked for, if the data lasts so long: whether kernels and input are tuned first depends on it.
            epochs=max(self.options.epochs, num_steps),
            stop_after=num_steps,
            nosave=True,
            notest=True,
            fresh=True,
            resume=False,
            mirror="",  # what is looked at for a moment is no run to keep
            log_every=num_steps,
            log_to=("none",),
            no_preflight=True,
        )
        with unpictured():
            train(options)


def _flag(item: tuple[str, Any]) -> str:
    name, value = item
    return f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
