"""Export of a deblurring network as an ONNX file for whole frames, compared with the network before it is written.

    blur   [N, L, 3, H, W] float32, RGB in 0..1        --\\
    spikes [N, L, C, h, w] float32, see the metadata   ---+--> sharp [N, L, 3, H, W] float32, RGB in 0..1

Normalisation (but for the division by the spike frames of a bin, which differ between streams), gain and clamping are
part of the model. N is free; L, H and W are fixed. Networks without spikes have no input `spikes`.

Dimension key:  N clips   L frames of a clip   C spike channels   H W frame   h w spike frame
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.export import ComparedModel, Exported, refuse_missing, write_card
from flatout.spike.config import DataConfig, SpikeConfig, config_from
from flatout.spike.model import Clip, DeblurNet
from flatout.spike.step import Normalise, apply_gain
from flatout.spike.weights import load_network

NUM_COMPARED = 2
"""Clips on which a file is compared; the model is traced with one, so that another number is tried as well."""


class WholeFrames(nn.Module):
    """The network for whole frames, with the normalisation of spikes and without the class `Clip`."""

    def __init__(self, network: DeblurNet, data: DataConfig) -> None:
        super().__init__()
        self.network = network
        # The division by spike frames is left to the caller: with `rate`, the input is already divided.
        kind = "none" if data.VOXEL_NORM == "rate" else data.VOXEL_NORM
        self._normalise = Normalise(kind, mean=data.NORM.MEAN, std=data.NORM.STD)
        self._gain = data.VOXEL_GAIN

    def forward(self, blur: Tensor, spikes: Tensor | None = None) -> Tensor:
        if spikes is None:
            spikes = blur[:, :, :1]  # not used by a network without spikes
        else:
            spikes = self._normalise(spikes, spikes)
            spikes = apply_gain(spikes, blur) if self._gain else spikes
        return self.network(Clip(blur, spikes)).clamp(0, 1)  # type: ignore[no-any-return]


def export_file(
    weights: Path,
    size_hw: tuple[int, int],
    *,
    length: int | None = None,
    output: str | Path | None = None,
    openvino: bool = False,
) -> Exported:
    """Export a weights file to `output`, by default beside it, for frames of `size_hw`.

    `length`: frames of a clip; None: 1, or the length of the training clips if the network mixes neighbouring frames.
    `openvino`: also write the model as `<stem>_openvino/<stem>.xml` and `.bin`.
    """
    refuse_missing("onnx", *(["openvino"] if openvino else []))
    network, metadata = load_network(weights)
    config = config_from(metadata["config"], where=f"{weights}, config")
    module = WholeFrames(network.cpu().float(), config.DATA).eval()
    examples = _examples(network, config, size_hw, length)
    model = ComparedModel(module, examples, "sharp", "clips", _facts(network, config.DATA, examples))
    done = model.write_onnx(Path(output or weights.with_suffix(".onnx")))
    if openvino:
        done = model.write_openvino(done)
    return replace(done, card=_write_card(done, model.facts))


def _write_card(done: Exported, facts: Mapping[str, str]) -> Path:
    return write_card(
        done.path.with_suffix(""),
        about=f"Deblurring of frames with the spikes of their exposure: network {facts['network']}.",
        inputs={name: f"{facts[name]}, float32" for name in ("blur", "spikes") if name in facts},
        input_rule="Give clips of exactly this length and size; the number of clips is free.",
        output=f"`sharp`, of the size of `blur`: {facts['sharp']}.",
        files=list(done.card_files()),
        compared_on="noise",
    )


def _examples(
    network: DeblurNet, config: SpikeConfig, size_hw: tuple[int, int], length: int | None
) -> dict[str, np.ndarray]:
    """Inputs of uniform noise by name, float32; spikes have the resolution that the network was trained with."""
    spec = network.spec
    is_temporal = spec["model"]["TEMPORAL"]
    length = length or (config.DATA.CLIP_LEN if is_temporal else 1)
    ratio_y = spec["ratio"] if spec["ratio"] > 0 else 2.0
    ratio_yx = (ratio_y, spec.get("ratio_x", ratio_y))
    spike_hw = tuple(round(side / ratio) for side, ratio in zip(size_hw, ratio_yx, strict=True))
    if min(spike_hw) < 1:
        raise ConfigError(f"--size {size_hw[0]} {size_hw[1]}: a frame must have at least one pixel of spikes.")
    if any(round(side * ratio) != whole for side, ratio, whole in zip(spike_hw, ratio_yx, size_hw, strict=True)):
        height, width = (f"{ratio:g}" for ratio in ratio_yx)
        raise ConfigError(
            f"--size {size_hw[0]} {size_hw[1]}: height and width must be multiples of "
            f"{height if height == width else f'{height} and {width}'}, because a pixel of spikes covers "
            f"{height} x {width} pixels of a frame."
        )
    random = np.random.default_rng(0)
    shapes = {"blur": (NUM_COMPARED, length, 3, *size_hw)}
    if spec["model"]["USE_SPIKE"]:
        shapes["spikes"] = (NUM_COMPARED, length, spec["channels"], *spike_hw)
    return {name: random.uniform(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def _facts(network: DeblurNet, data: DataConfig, examples: Mapping[str, np.ndarray]) -> dict[str, str]:
    """What a consumer of the model must know."""
    facts = {name: f"{list(each.shape[1:])} after the free axis of clips" for name, each in examples.items()}
    facts["blur"] += ": frames of a clip, RGB in 0..1, height, width"
    if "spikes" in examples:
        facts["spikes"] += f": frames of a clip, channels, height, width; {describe_spikes(data)}"
    return {**facts, "sharp": "restored frames, RGB in 0..1", "network": json.dumps(network.spec["model"])}


def describe_spikes(data: DataConfig) -> str:
    """The values of the input `spikes`, in words."""
    bins = data.channels
    if data.SPIKE_REPR == "voxel":
        unit = "spikes per spike frame, as flatout.spike.voxel gives" if data.VOXEL_NORM == "rate" else "spikes"
        return f"{unit} in each of {bins} bins of the stream"
    if data.SPIKE_REPR == "window":
        return f"the middle {bins} spike frames, 0 or 1"
    return f"TFP in 0..1 of {data.TFP_HALF_WINDOW} spike frames on each side, at {bins} moments"
