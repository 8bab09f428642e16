"""What a step of the deblurring job computes: a clip made floats on the device, the loss of its sharp frames out.

What a wrong pixel costs: Charbonnier, and optionally the difference of what VGG-16 sees.

Dimension key:  N clips   L frames   H W frame

Steps and learning rates of a spike training: pure functions of the position.

A *micro-batch* is what one forward sees; an optimizer step follows every `accumulation` of them. Micro-batches that do
not fill a step at the end of an epoch are not trained, so no gradient leaks into the next epoch.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.clock import clock
from flatout.engine import Padding, StepSettings
from flatout.errors import CheckpointError, ConfigError
from flatout.feed import DeviceBatch
from flatout.safefiles import read_plain
from flatout.spike.config import DataConfig, LossConfig, PerceptualConfig
from flatout.spike.model import Clip

logger = logging.getLogger(__name__)

VGG_WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512)
"""Channels of VGG-16's convolutions; 0 is a pooling."""
FEATURES = {"relu1_2": 3, "relu2_2": 8, "relu3_3": 15, "relu4_3": 22, "relu5_3": 29}
"""Place of a feature in the stack."""


def charbonnier(predicted: Tensor, target: Tensor, delta: float) -> Tensor:
    """Mean of sqrt(difference^2 + delta^2)."""
    return ((predicted - target).square() + delta**2).sqrt().mean()


class DeblurLoss(nn.Module):
    """The weighted sum of the terms, and each of them."""

    names = ("loss", "charbonnier", "perceptual")

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self._config = config
        self._perceptual = Perceptual(config.VGG_PERCEPTUAL) if config.VGG_PERCEPTUAL.WEIGHTS else None

    def forward(self, predicted_NL3HW: Tensor, target_NL3HW: Tensor) -> Tensor:
        """float32 [3]: the sum first, then its terms before weighting."""
        config = self._config
        predicted = predicted_NL3HW.float()
        main = charbonnier(predicted, target_NL3HW, config.CHARBONNIER.DELTA)
        seen = torch.zeros_like(main)
        if self._perceptual is not None:
            seen = self._perceptual(predicted.flatten(0, 1), target_NL3HW.flatten(0, 1))
        total = config.CHARBONNIER.WEIGHT * main + config.VGG_PERCEPTUAL.WEIGHT * seen
        return torch.stack((total, main, seen))


class Perceptual(nn.Module):
    """Mean absolute difference of VGG-16 features, normalised as its weights demand."""

    def __init__(self, config: PerceptualConfig) -> None:
        super().__init__()
        if unknown := [name for name in config.LAYERS if name not in FEATURES]:
            raise ConfigError(f"LOSS.VGG_PERCEPTUAL.LAYERS: {unknown[0]} is unknown: use {', '.join(FEATURES)}.")
        self._places = sorted(FEATURES[name] for name in config.LAYERS)
        layers = list(_vgg16())[: self._places[-1] + 1]
        self._layers = nn.ModuleList(layers)
        assert config.WEIGHTS is not None
        _load(self._layers, Path(config.WEIGHTS))
        self._layers.requires_grad_(False)
        self.register_buffer("_mean", torch.tensor(config.MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("_std", torch.tensor(config.STD).view(1, 3, 1, 1), persistent=False)

    def forward(self, predicted_N3HW: Tensor, target_N3HW: Tensor) -> Tensor:
        mean, std = self.get_buffer("_mean"), self.get_buffer("_std")
        a, b = ((each - mean) / std for each in (predicted_N3HW, target_N3HW))
        total = torch.zeros((), device=a.device)
        for place, layer in enumerate(self._layers):
            a, b = layer(a), layer(b)
            if place in self._places:
                total = total + F.l1_loss(a.float(), b.float())
        return total


def _vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG_WIDTHS:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    return nn.Sequential(*layers)


def _load(layers: nn.Module, path: Path) -> None:
    """The layers' weights from a file in torchvision's names; nothing in the file is run."""
    state = {key.removeprefix("features."): value for key, value in _tensors_in(path).items()}
    wanted = layers.state_dict()
    if missing := [key for key, value in wanted.items() if key not in state or state[key].shape != value.shape]:
        raise CheckpointError(f"{path}: no VGG-16 weights: features.{missing[0]} is missing or of another shape.")
    layers.load_state_dict({key: state[key] for key in wanted})


def _tensors_in(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    objects = read_plain(path)
    if not isinstance(objects, dict):
        raise CheckpointError(f"{path}: no state dict of tensors.")
    return {str(key): value for key, value in objects.items() if isinstance(value, Tensor)}


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
    paddings: Mapping[str, Padding] = {}

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


FIRST_SHARE = 0.001
"""Of the learning rate, at the first step of a warm-up."""


class StepPlan(NamedTuple):
    """How an epoch divides into steps."""

    samples_per_rank: int
    micro_batches: int
    """Per rank and epoch, the left-over ones included."""
    steps_per_epoch: int
    """Optimizer steps."""
    leftover: int
    accumulation: int
    samples_per_step: int
    """Over all ranks."""

    @property
    def trained_micro_batches(self) -> int:
        return self.steps_per_epoch * self.accumulation

    def epochs_for(self, total_steps: int) -> int:
        """Whole epochs that hold at least so many optimizer steps."""
        return -(-total_steps // self.steps_per_epoch)


def plan_steps(samples: int, *, world: int, batch: int, accumulation: int) -> StepPlan:
    """Divide an epoch; ConfigError if it has no whole step."""
    per_rank = samples // world
    micro = per_rank // batch
    steps = micro // accumulation
    if steps == 0:
        raise ConfigError(
            f"{samples} training clips make no whole step of {world} GPUs x BATCH_SIZE {batch} x "
            f"GRADIENT_ACCUMULATION_STEPS {accumulation}. Use smaller numbers, or more data."
        )
    return StepPlan(per_rank, micro, steps, micro - steps * accumulation, accumulation, world * batch * accumulation)


def learning_rate(base: float, step: int, *, warmup: int, total: int) -> float:
    """After `step` finished optimizer steps."""
    if not 0 < warmup < total:
        warmup = 0
    if step < warmup:
        return base * (FIRST_SHARE + (1 - FIRST_SHARE) * step / warmup)
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


class SpikeSchedule:
    """StepSettings of a micro-batch. Pure: it does not matter where a run began."""

    def __init__(self, base: float, *, plan: StepPlan, epochs: int, warmup: int) -> None:
        self._base, self._plan, self._warmup = base, plan, warmup
        self._total = epochs * plan.steps_per_epoch

    def __call__(self, epoch: int, step: int) -> StepSettings:
        accumulation = self._plan.accumulation
        done = epoch * self._plan.steps_per_epoch + step // accumulation
        rate = learning_rate(self._base, done, warmup=self._warmup, total=self._total)
        return StepSettings(lrs=(rate, rate), momentum=None, step_optimizer=(step + 1) % accumulation == 0)
