"""One training step: batch to clip, network, loss; optimizer steps and learning rate.

A *micro-batch* is the input of one forward pass; an optimizer step follows after every `accumulation` of them.
Micro-batches that do not fill an optimizer step at the end of an epoch are not trained, so that no gradient is carried
over into the next epoch. Steps and learning rates are pure functions of the position.

Dimension key:  N clips, or frames without L   L frames of a clip   C spike channels   H W frame   h w spike frame
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
from flatout.errors import CheckpointError, ConfigError, counted
from flatout.feed import DeviceBatch
from flatout.safefiles import read_plain
from flatout.spike.config import DataConfig, LossConfig, PerceptualConfig
from flatout.spike.model import Clip

logger = logging.getLogger(__name__)

# Loss: Charbonnier, and optionally the difference of VGG-16 features

VGG_WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512)
"""Channels of the convolutions of VGG-16; 0 is a pooling layer."""
FEATURES = {"relu1_2": 3, "relu2_2": 8, "relu3_3": 15, "relu4_3": 22, "relu5_3": 29}
"""Index of each feature layer in the network."""


def charbonnier(predicted: Tensor, target: Tensor, delta: float) -> Tensor:
    """Mean of sqrt(difference^2 + delta^2)."""
    return ((predicted - target).square() + delta**2).sqrt().mean()


class DeblurLoss(nn.Module):
    """Charbonnier and perceptual loss; `forward` returns [weighted sum, each term without its weight]."""

    names = ("loss", "charbonnier", "perceptual")

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self._config = config
        self._perceptual = Perceptual(config.VGG_PERCEPTUAL) if config.VGG_PERCEPTUAL.WEIGHTS else None

    def forward(self, predicted_NL3HW: Tensor, target_NL3HW: Tensor) -> Tensor:
        """float32 [3]: the weighted sum, then its terms without weights."""
        config = self._config
        predicted = predicted_NL3HW.float()
        main = charbonnier(predicted, target_NL3HW, config.CHARBONNIER.DELTA)
        perceptual = torch.zeros_like(main)
        if self._perceptual is not None:
            perceptual = self._perceptual(predicted.flatten(0, 1), target_NL3HW.flatten(0, 1))
        total = config.CHARBONNIER.WEIGHT * main + config.VGG_PERCEPTUAL.WEIGHT * perceptual
        return torch.stack((total, main, perceptual))


class Perceptual(nn.Module):
    """Mean absolute difference of VGG-16 features, with the normalisation that the weights expect."""

    def __init__(self, config: PerceptualConfig) -> None:
        super().__init__()
        if unknown := [name for name in config.LAYERS if name not in FEATURES]:
            raise ConfigError(f"LOSS.VGG_PERCEPTUAL.LAYERS: {unknown[0]} is unknown: use {', '.join(FEATURES)}.")
        self._indices = sorted(FEATURES[name] for name in config.LAYERS)
        layers = list(vgg16())[: self._indices[-1] + 1]
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
        for index, layer in enumerate(self._layers):
            a, b = layer(a), layer(b)
            if index in self._indices:
                total = total + F.l1_loss(a.float(), b.float())
        return total


def vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG_WIDTHS:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    return nn.Sequential(*layers)


def _load(layers: nn.Module, path: Path) -> None:
    """Load weights under torchvision's names from a file, without executing anything in it."""
    state = {key.removeprefix("features."): value for key, value in tensors_in(path).items()}
    expected = layers.state_dict()
    if missing := [key for key, value in expected.items() if key not in state or state[key].shape != value.shape]:
        raise CheckpointError(f"{path}: no VGG-16 weights: features.{missing[0]} is missing or has another shape.")
    layers.load_state_dict({key: state[key] for key in expected})


def tensors_in(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    objects = read_plain(path)
    if not isinstance(objects, dict):
        raise CheckpointError(f"{path}: it does not hold a state dict of tensors.")
    return {str(key): value for key, value in objects.items() if isinstance(value, Tensor)}


# From the bytes of a batch to the input of the network, converted on the device: only a quarter of the bytes has to be
# copied, and the CPU is not used

VoxelNorm = Literal["none", "rate", "log1p", "meanstd"]
MIN_STD = 1e-12
MIN_RATE = 1e-6


class Normalise:
    """Converts spike counts to float32, normalised as VOXEL_NORM says."""

    def __init__(self, kind: VoxelNorm = "none", *, mean: float = 0.0, std: float = 1.0, scale: float = 1.0) -> None:
        """`scale` is applied to the counts first: 1 / 255 for textures, which are not counts."""
        if kind not in ("none", "rate", "log1p", "meanstd"):
            raise ValueError(f"VOXEL_NORM={kind!r} is unknown: use none, rate, log1p or meanstd.")
        self._kind, self._mean, self._std, self._scale = kind, mean, max(std, MIN_STD), scale

    def __call__(self, counts_NLCHW: Tensor, frames_NLC: Tensor) -> Tensor:
        """`frames_NLC`: spike frames of each channel; the rate of a channel without any is 0."""
        values = counts_NLCHW.float() * self._scale
        if self._kind == "rate":
            return values / frames_NLC.clamp(min=1)[..., None, None]
        if self._kind == "log1p":
            return torch.log1p(values)
        if self._kind == "meanstd":
            return (values - self._mean) / self._std
        return values


def apply_gain(rates_NLCHW: Tensor, blur_NL3HW: Tensor) -> Tensor:
    """Multiply rates by mean brightness / mean rate of the clip, to be independent of the camera's threshold."""
    brightness = blur_NL3HW.float().mean(dim=(1, 2, 3, 4))
    rate = rates_NLCHW.mean(dim=(1, 2, 3, 4)).clamp(min=MIN_RATE)
    return rates_NLCHW * (brightness / rate)[:, None, None, None, None]


class ToClip:
    """Converts the fields of a batch to a clip, without waiting for the device."""

    def __init__(self, config: DataConfig) -> None:
        scale = 1 / 255 if config.SPIKE_REPR == "tfp" else 1.0
        self._normalise = Normalise(config.VOXEL_NORM, mean=config.NORM.MEAN, std=config.NORM.STD, scale=scale)
        self._gain = config.VOXEL_GAIN

    def __call__(self, fields: Mapping[str, Tensor]) -> Clip:
        """From `blur` uint8 [N, L, H, W, 3], `spikes` [N, L, C, h, w] and `spike_frames` [N, L, C]."""
        blur = to_float_frames(fields["blur"])
        spikes = self._normalise(fields["spikes"], fields["spike_frames"])
        return Clip(blur, apply_gain(spikes, blur) if self._gain else spikes)


def to_float_frames(bytes_NLHW3: Tensor) -> Tensor:
    """Convert uint8 frames to float32 [N, L, 3, H, W] in 0..1; channels stay last in memory."""
    return bytes_NLHW3.permute(0, 1, 4, 2, 3).float() / 255


# The step

FIELDS = ("blur", "sharp", "spikes", "spike_frames")


class DeblurJob:
    """Predicts sharp frames from blurry ones and their spikes."""

    item_names = DeblurLoss.names
    paddings: Mapping[str, Padding] = {}

    def __init__(self, to_clip: ToClip, loss: DeblurLoss, *, loss_weight: float) -> None:
        """`loss_weight`: the share of one micro-batch of one rank in an optimizer step."""
        self._to_clip, self._loss, self._loss_weight = to_clip, loss, loss_weight

    def phase(self, epoch: int) -> object:
        return None

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        return {name: batch[name] for name in FIELDS}

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with clock.stage("train.forward"):
            predicted = network(self._to_clip(inputs))
        with clock.stage("train.loss"):
            items = self._loss(predicted, to_float_frames(inputs["sharp"]))
        return items[0] * self._loss_weight, items


# Optimizer steps and learning rate

WARMUP_START = 0.001
"""Share of the learning rate at the first step of the warm-up."""


class StepPlan(NamedTuple):
    """How an epoch is divided into optimizer steps."""

    samples_per_rank: int
    micro_batches: int
    """Micro-batches per rank and epoch, including those left over."""
    steps_per_epoch: int
    """Optimizer steps per epoch."""
    leftover: int
    """Micro-batches that do not fill an optimizer step."""
    accumulation: int
    """Micro-batches per optimizer step."""
    samples_per_step: int
    """Samples per optimizer step, over all ranks."""

    @property
    def trained_micro_batches(self) -> int:
        return self.steps_per_epoch * self.accumulation

    def epochs_for(self, total_steps: int) -> int:
        """Number of whole epochs with at least `total_steps` optimizer steps."""
        return -(-total_steps // self.steps_per_epoch)


def plan_steps(samples: int, *, world: int, batch: int, accumulation: int) -> StepPlan:
    """Divide an epoch into optimizer steps; ConfigError if there is no whole step."""
    per_rank = samples // world
    micro = per_rank // batch
    steps = micro // accumulation
    if steps == 0:
        raise ConfigError(
            f"There are {samples} training clips, but one step takes {world * batch * accumulation} "
            f"({counted(world, 'process')} x BATCH_SIZE {batch} x GRADIENT_ACCUMULATION_STEPS {accumulation}). Reduce "
            "one of the three, or use more data."
        )
    return StepPlan(per_rank, micro, steps, micro - steps * accumulation, accumulation, world * batch * accumulation)


def learning_rate(base: float, step: int, *, warmup: int, total: int) -> float:
    """Learning rate after `step` finished optimizer steps: linear warm-up, then half a cosine to 0."""
    if not 0 < warmup < total:
        warmup = 0
    if step < warmup:
        return base * (WARMUP_START + (1 - WARMUP_START) * step / warmup)
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


class SpikeSchedule:
    """Settings of each micro-batch, a pure function of epoch and step."""

    def __init__(self, base: float, *, plan: StepPlan, epochs: int, warmup: int) -> None:
        self._base, self._plan, self._warmup = base, plan, warmup
        self._total = epochs * plan.steps_per_epoch

    def __call__(self, epoch: int, step: int) -> StepSettings:
        accumulation = self._plan.accumulation
        done = epoch * self._plan.steps_per_epoch + step // accumulation
        rate = learning_rate(self._base, done, warmup=self._warmup, total=self._total)
        return StepSettings(lrs=(rate, rate), momentum=None, step_optimizer=(step + 1) % accumulation == 0)
