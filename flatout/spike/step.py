"""What a step of the deblurring job computes: a clip made floats on the device, the loss of its sharp frames out."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from flatout.clock import clock
from flatout.engine import Filling
from flatout.feed import DeviceBatch
from flatout.spike.config import DataConfig
from flatout.spike.loss import DeblurLoss
from flatout.spike.model import Clip

# From counts to what the network sees, on the device: a quarter of the bytes travel, and the CPU does not compute.
#
# Dimension key:  N clips   L frames   C channels   H W spike picture

VoxelNorm = Literal["none", "rate", "log1p", "meanstd"]
LEAST_STD = 1e-12
LEAST_RATE = 1e-6


class Normalise:
    """Counts to float32, in the way the config names."""

    def __init__(self, kind: VoxelNorm = "none", *, mean: float = 0.0, std: float = 1.0, scale: float = 1.0) -> None:
        """`scale` multiplies counts first: 1 / 255 for textures, which are no counts."""
        if kind not in ("none", "rate", "log1p", "meanstd"):
            raise ValueError(f"VOXEL_NORM={kind!r} is unknown: use none, rate, log1p or meanstd.")
        self._kind, self._mean, self._std, self._scale = kind, mean, max(std, LEAST_STD), scale

    def __call__(self, counts_NLCHW: Tensor, frames_NLC: Tensor) -> Tensor:
        """`frames_NLC`: spike frames behind each channel; a channel with none is 0 as a rate."""
        values = counts_NLCHW.float() * self._scale
        if self._kind == "rate":
            return values / frames_NLC.clamp(min=1)[..., None, None]
        if self._kind == "log1p":
            return torch.log1p(values)
        if self._kind == "meanstd":
            return (values - self._mean) / self._std
        return values


def gained(rates_NLCHW: Tensor, blur_NL3HW: Tensor) -> Tensor:
    """Rates times mean brightness / mean rate of the clip: independent of the camera's threshold."""
    brightness = blur_NL3HW.float().mean(dim=(1, 2, 3, 4))
    rate = rates_NLCHW.mean(dim=(1, 2, 3, 4)).clamp(min=LEAST_RATE)
    return rates_NLCHW * (brightness / rate)[:, None, None, None, None]


# Bytes of a batch to what the network sees, on the device.
#
# Dimension key:  N clips   L frames   C spike channels   H W frame   h w spike picture


class ToClip:
    """Turns the fields of a batch into a clip and its sharp frames; nothing here waits for the device."""

    def __init__(self, config: DataConfig) -> None:
        scale = 1 / 255 if config.SPIKE_REPR == "tfp" else 1.0
        self._normalise = Normalise(config.VOXEL_NORM, mean=config.NORM.MEAN, std=config.NORM.STD, scale=scale)
        self._gain = config.VOXEL_GAIN

    def __call__(self, fields: Mapping[str, Tensor]) -> Clip:
        """From `blur` uint8 [N, L, H, W, 3], `spikes` [N, L, C, h, w] and `spike_frames` [N, L, C]."""
        blur = pictures(fields["blur"])
        spikes = self._normalise(fields["spikes"], fields["spike_frames"])
        return Clip(blur, gained(spikes, blur) if self._gain else spikes)


def pictures(bytes_NLHW3: Tensor) -> Tensor:
    """float32 [N, L, 3, H, W] in 0..1, channels side by side in memory as they came."""
    return bytes_NLHW3.permute(0, 1, 4, 2, 3).float() / 255


FIELDS = ("blur", "sharp", "spikes", "spike_frames")


class DeblurJob:
    """Sharp frames from blurry ones and their spikes."""

    item_names = DeblurLoss.names
    fillings: Mapping[str, Filling] = {}

    def __init__(self, to_clip: ToClip, loss: DeblurLoss, *, share: float) -> None:
        """`share`: of a micro-batch of one rank in an optimizer step."""
        self._to_clip, self._loss, self._share = to_clip, loss, share

    def phase(self, epoch: int) -> object:
        return None

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        return {name: batch[name] for name in FIELDS}

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with clock.stage("train.forward"):
            predicted = network(self._to_clip(inputs))
        with clock.stage("train.loss"):
            items = self._loss(predicted, pictures(inputs["sharp"]))
        return items[0] * self._share, items
