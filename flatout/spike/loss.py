"""What a wrong pixel costs: Charbonnier, and optionally the difference of what VGG-16 sees.

Dimension key:  N clips   L frames   H W frame
"""

import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.errors import CheckpointError, ConfigError
from flatout.safefiles import read_plain
from flatout.spike.config import LossConfig, PerceptualConfig

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
