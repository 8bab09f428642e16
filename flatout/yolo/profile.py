"""The detection training for `flatout profile`: which switches to try, and how to run a few steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.engine import has_native_bf16
from flatout.profiler import CUDA_GRAPH, ON_DEVICE
from flatout.ranks import choose_devices
from flatout.runs import FILES, Decoding, ProfiledTraining, Switch
from flatout.yolo.options import TrainOptions


@dataclass(frozen=True)
class YoloTraining(ProfiledTraining):
    """A detection training."""

    options: TrainOptions

    @property
    def title(self) -> str:
        options = self.options
        return f"{Path(options.cfg or options.weights).stem}, {options.img_size[0]} px, batch {options.batch_size}"

    def network_switches(self) -> Mapping[str, Switch]:
        """None on a GPU: --fast includes all of them, and each trial would compile its own kernels.

        On a CPU, bf16 is tried together with channels_last, as --fast chooses it, and only where the CPU has
        instructions for it.
        """
        options, found = self.options, dict[str, Switch]()
        if self._on_gpu or options.fast:
            return found
        if not options.channels_last:
            found["channels_last"] = Switch("--channels-last", {"channels_last": True})
        if options.amp is None and has_native_bf16(choose_devices(options.device)[0]):
            change = "--amp bf16" if options.channels_last else "--channels-last --amp bf16"
            found["channels_last and bf16"] = Switch(change, {"channels_last": True, "amp": "bf16"})
        return found

    def end_to_end_switches(self) -> Mapping[str, Switch]:
        """None on a CPU: network and input share its cores, so timing them separately would mean nothing."""
        if not self._on_gpu or self.options.fast:
            return {}
        covers = (CUDA_GRAPH, ON_DEVICE)
        return {"everything that --fast switches on": Switch("--fast", {"fast": True}, covers=covers)}

    @property
    def _on_gpu(self) -> bool:
        return choose_devices(self.options.device)[0].type == "cuda"

    def own_switch(self, switch: Mapping[str, Any]) -> Switch | None:
        """The switch under the names of its flags, for the verdict."""
        return Switch(" ".join(map(_flag, switch.items())), switch)

    def decoding(self) -> Decoding:
        from flatout.images import read_image
        from flatout.yolo.data.open_data import images_of, open_data_set

        data = open_data_set(self.options.data)
        return Decoding(read_image, images_of(data.entries["train"], data.names).paths[:FILES])

    def brief(self, folder: Path, num_steps: int) -> Any:
        # At least as many epochs as requested, because whether kernels and input are tuned first depends on it.
        epochs = max(self.options.epochs, num_steps)
        # Steps that wait for images which are decoded only once would say nothing about the others.
        return replace(super().brief(folder, num_steps), epochs=epochs, nosave=True, notest=True, decode_first=True)


def _flag(item: tuple[str, Any]) -> str:
    name, value = item
    return f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
