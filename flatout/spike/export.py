"""Export of a deblurring network as an ONNX file for whole frames, compared with the network before it is written.

    blur   [N, L, 3, H, W] float32, RGB in 0..1        --\\
    spikes [N, L, C, h, w] float32, see the metadata   ---+--> sharp [N, L, 3, H, W] float32, RGB in 0..1

Normalisation (but for the division by the spike frames of a bin, which differ between streams), gain and clamping are
part of the model. N is free; L, H and W are fixed. Networks without spikes have no input `spikes`.

Dimension key:  N clips   L frames of a clip   C spike channels   H W frame   h w spike frame
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from flatout.errors import ConfigError, ParityError, ResourceError
from flatout.export import (
    CardFile,
    OpenVino,
    Run,
    Session,
    is_installed,
    openvino_use,
    refuse_missing,
    require_package,
    save,
    save_parts,
    set_metadata,
    traced,
    write_card,
)
from flatout.spike.config import DataConfig, SpikeConfig, config_from
from flatout.spike.model import Clip, DeblurNet
from flatout.spike.step import Normalise, apply_gain
from flatout.spike.weights import load_network

logger = logging.getLogger(__name__)

OPSET = 17
TOLERANCE = 1e-4
"""Largest difference of brightness, in 0..1, that an exported file may have from the network."""
NUM_COMPARED = 2
"""Clips on which a file is compared; the model is traced with one, so that another number is tried as well."""


@dataclass(frozen=True)
class Exported:
    """The exported files, and how much they differ from the network."""

    path: Path
    largest_difference: float | None
    """Largest difference of brightness in 0..1, computed by ONNX Runtime; None if that is not installed."""
    openvino: Path | None = None
    """The folder with the OpenVINO model, if one was requested."""
    openvino_difference: float | None = None
    """The same difference, computed by OpenVINO."""
    card: Path | None = None
    """The model card that was written beside them."""


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
    model = WholeFrames(network.cpu().float(), config.DATA).eval()
    examples = _examples(network, config, size_hw, length)
    path = Path(output or weights.with_suffix(".onnx"))
    onnx_model = traced(
        model,
        [torch.from_numpy(each[:1]) for each in examples.values()],
        input_name=list(examples),
        output_names=["sharp"],
        free_axes={name: {0: "clips"} for name in (*examples, "sharp")},
        opset=OPSET,
    )
    facts = _facts(network, config.DATA, examples)
    set_metadata(onnx_model, facts)
    difference = None
    if is_installed("onnxruntime"):
        difference = _compared(model, Session(onnx_model), examples, path)
    else:
        logger.warning(
            "%s was not verified, because onnxruntime is not installed: pip install onnxruntime, and export again.",
            path,
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error.strerror}. Choose another folder.") from None
    save(onnx_model, path)
    done = Exported(path, difference)
    if openvino:
        runtime = OpenVino(require_package("onnx").load(str(path)))
        folder = path.with_name(f"{path.stem}_openvino")
        difference = _compared(model, runtime, examples, folder)
        save_parts(folder, path.stem, {**runtime.files(), ".json": json.dumps(facts, indent=1).encode()})
        done = replace(done, openvino=folder, openvino_difference=difference)
    return replace(done, card=_write_card(done, facts))


def _write_card(done: Exported, facts: Mapping[str, str]) -> Path:
    def compared(difference: float | None) -> str:
        return "not compared" if difference is None else f"largest difference {difference:.1e} (limit {TOLERANCE:g})"

    use = f'`onnxruntime.InferenceSession("{done.path.name}")`.'
    files = [CardFile(done.path, compared(done.largest_difference), use)]
    if done.openvino is not None:
        use = openvino_use(f"{done.openvino.name}/{done.path.stem}.xml")
        files.append(CardFile(done.openvino, compared(done.openvino_difference), use))
    return write_card(
        done.path.with_suffix(""),
        about=f"Deblurring of frames with the spikes of their exposure: network {facts['network']}.",
        inputs={name: f"{facts[name]}, float32" for name in ("blur", "spikes") if name in facts},
        input_rule="Give clips of exactly this length and size; the number of clips is free.",
        output=f"`sharp`, of the size of `blur`: {facts['sharp']}.",
        files=files,
        compared_on="noise",
    )


def _examples(
    network: DeblurNet, config: SpikeConfig, size_hw: tuple[int, int], length: int | None
) -> dict[str, np.ndarray]:
    """Inputs of uniform noise by name, float32; spikes have the resolution that the network was trained with."""
    spec = network.spec
    is_temporal = spec["model"]["TEMPORAL"]
    length = length or (config.DATA.CLIP_LEN if is_temporal else 1)
    ratio = spec["ratio"] if spec["ratio"] > 0 else 2.0
    spike_hw = tuple(round(side / ratio) for side in size_hw)
    if min(spike_hw) < 1:
        raise ConfigError(f"--size {size_hw[0]} {size_hw[1]}: a frame must have at least one pixel of spikes.")
    if any(round(side * ratio) != whole for side, whole in zip(spike_hw, size_hw, strict=True)):
        raise ConfigError(
            f"--size {size_hw[0]} {size_hw[1]}: height and width must be multiples of {ratio:g}, because a pixel of "
            f"spikes covers {ratio:g} x {ratio:g} pixels of a frame."
        )
    random = np.random.default_rng(0)
    shapes = {"blur": (NUM_COMPARED, length, 3, *size_hw)}
    if spec["model"]["USE_SPIKE"]:
        shapes["spikes"] = (NUM_COMPARED, length, spec["channels"], *spike_hw)
    return {name: random.uniform(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def _compared(model: WholeFrames, run: Run, examples: Mapping[str, np.ndarray], path: Path) -> float:
    """Largest difference of a loaded model from the network; ParityError that names `path` if above the tolerance."""
    found = run(examples)["sharp"]
    with torch.inference_mode():
        expected = model(*(torch.from_numpy(each) for each in examples.values())).numpy()
    difference = float(np.abs(found - expected).max())
    if not difference <= TOLERANCE:
        raise ParityError(
            f"{path}: the exported model differs from the network by {difference:.1e}, more than {TOLERANCE:g}, so "
            "nothing was written. Please report it."
        )
    return difference


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
