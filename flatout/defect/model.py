"""The segmentation networks: a U-Net over patches of target, ref1 and ref2, with two classes.

    encoder: six levels, each with half the side of the one before      decoder: upsampling, joined with encoder maps
    v1: two convolutions per decoder level      v2: SPPF at the coarsest level, squeeze-and-excite, one convolution

Tensor names match published checkpoints of this architecture, so that those can be loaded.

Dimension key:  B samples   C channels   H W patch, multiples of 32
"""

import math
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.errors import ConfigError

Version = Literal["v1", "v2"]
GRID = 32
"""Height and width of the input must be multiples of this."""
CLASSES = 2
"""0 background, 1 defect."""
SQUEEZE = 16
"""Channel reduction inside `SqueezeExcite`."""


class DefectNet(nn.Module):
    """Maps canonical patches [B, 3, H, W], divided by 255, to logits [B, 2, H, W]."""

    def __init__(self, version: Version = "v1", base: int = 64) -> None:
        super().__init__()
        if version not in ("v1", "v2"):
            raise ConfigError(f"network={version!r} is unknown: use 'v1' or 'v2'.")
        if base < 1 or (version == "v2" and base % 8):
            raise ConfigError(f"base_width={base}: it must be positive, and for v2 a multiple of 8.")
        self.version, self.base = version, base
        self.encoder = Encoder(base, pools=version == "v2")
        self.decoder = Decoder(base, version)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.decoder(*self.encoder(x))
        return logits

    @property
    def last_layer(self) -> nn.Conv2d:
        """The convolution that gives the logits."""
        (layer,) = (module for module in self.decoder.fin_out.modules() if isinstance(module, nn.Conv2d))
        return layer

    def predict_prior(self, probability: float) -> None:
        """Set the bias of the last layer so that an untrained network gives defects about this probability.

        Defects are rare: otherwise the first epochs go into a bias that says so, which can push all features to zero.
        """
        margin = math.log(probability / (1 - probability))
        with torch.no_grad():
            assert self.last_layer.bias is not None
            self.last_layer.bias.copy_(torch.tensor([-margin / 2, margin / 2]))


# What can be wrong with a trained network

DEAD_SHARE = 0.5
"""Share of the defect pixels without any feature from which on the last layer counts as dead."""
CONSTANT_MARGIN = 1e-3
"""Difference of logits below which the output counts as constant: 0.025 % in probability."""
LEARNED_MARGIN = 0.1
"""Mean logit of defects, less that of other pixels, from which on a network has begun to distinguish them."""


@torch.inference_mode()
def detection_problem(network: DefectNet, x_BCHW: Tensor, is_defect_BHW: Tensor) -> str:
    """Why a network in evaluation mode cannot distinguish defects in these patches; empty if nothing is wrong.

    Features before the last layer are never negative. Where all of them are zero, its output is its bias, whatever the
    image shows, and no gradient reaches the layers before it.
    """
    features: list[Tensor] = []
    hook = network.last_layer.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    try:
        logits_B2HW = network(x_BCHW).float()
    finally:
        hook.remove()
    margin_BHW = logits_B2HW[:, 1] - logits_B2HW[:, 0]
    if float(margin_BHW.max() - margin_BHW.min()) < CONSTANT_MARGIN:
        return f"it predicts {float(torch.sigmoid(margin_BHW.mean())):.4f} for every pixel, with and without a defect"
    if not is_defect_BHW.any():
        return ""
    share = float((features[0] <= 0).all(1)[is_defect_BHW].float().mean())
    if share > DEAD_SHARE:
        return f"all inputs of its last layer are 0 at {share:.0%} of the pixels of painted defects"
    of_defects, elsewhere = (float(margin_BHW[there].mean()) for there in (is_defect_BHW, ~is_defect_BHW))
    if of_defects - elsewhere < LEARNED_MARGIN:
        return "the probability that it predicts for painted defects is on average no higher than that of other pixels"
    return ""


class Encoder(nn.Module):
    """Feature maps of all six levels, finest first."""

    def __init__(self, base: int, *, pools: bool) -> None:
        super().__init__()
        widths = [3, base, 2 * base, 4 * base, 8 * base, 8 * base, 8 * base]
        for level, (inner, outer) in enumerate(pairwise(widths), start=1):
            setattr(self, f"block{level}", nn.Sequential(*_conv(inner, outer), *_conv(outer, outer)))
        self.pool = nn.MaxPool2d(2)
        self.sppf = Sppf(8 * base) if pools else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps: list[Tensor] = []
        for level in range(1, 7):
            finer = self.pool(maps[-1]) if maps else x
            maps.append(getattr(self, f"block{level}")(finer))
        return *maps[:-1], self.sppf(maps[-1])


class Decoder(nn.Module):
    """Per level two convolutions (v1), or squeeze-and-excite and one convolution (v2)."""

    def __init__(self, base: int, version: Version) -> None:
        super().__init__()
        for name, factors in _LEVELS.items():
            inner, up, skip = (base * factor for factor in factors)
            setattr(self, f"up{name}", _up(inner, up))
            setattr(self, f"se{name}", SqueezeExcite(up + skip) if version == "v2" else nn.Identity())
            convs = [*_conv(up + skip, up), *(_conv(up, up) if version == "v1" else ())]
            setattr(self, f"db{name}", nn.Sequential(*convs))
        last = nn.Conv2d(base, CLASSES, 3, padding=1)
        self.fin_out = nn.Sequential(last) if version == "v1" else last

    def forward(self, *maps: Tensor) -> Tensor:
        x = maps[-1]
        for name, skip in zip(_LEVELS, maps[-2::-1], strict=True):
            up = getattr(self, f"up{name}")(x)
            weighted = getattr(self, f"se{name}")(torch.cat((up, skip), 1))
            x = getattr(self, f"db{name}")(weighted)
        logits: Tensor = self.fin_out(x)
        return logits


class SqueezeExcite(nn.Module):
    """Scales every channel by a weight computed from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // SQUEEZE
        self.fc = nn.Sequential(
            nn.Linear(channels, inner), nn.ReLU(inplace=True), nn.Linear(inner, channels), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        weight_BC: Tensor = self.fc(x.mean((2, 3)))
        return x * weight_BC[..., None, None]


class Sppf(nn.Module):
    """Spatial pyramid pooling (fast).

    1x1 convolution to half the channels, three stacked 5 x 5 max-poolings, all four maps concatenated, 1x1 convolution
    back.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(*_conv(channels, channels // 2, 1))
        self.conv2 = nn.Sequential(*_conv(2 * channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.conv1(x)]
        for _ in range(3):
            maps.append(F.max_pool2d(maps[-1], 5, stride=1, padding=2))
        merged: Tensor = self.conv2(torch.cat(maps, 1))
        return merged


_LEVELS = {"_b": (8, 8, 8), "1": (8, 4, 8), "2": (4, 2, 4), "3": (2, 1, 2), "4": (1, 1, 1)}
"""Ending of the names of each decoder level, coarsest first -> its channels, in multiples of the base width: input,
after upsampling, skip connection."""


def _conv(inner: int, outer: int, side: int = 3) -> list[nn.Module]:
    # The bias has no effect before a batch norm, but published checkpoints contain it.
    return [nn.Conv2d(inner, outer, side, padding=side // 2), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]


def _up(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), *_conv(inner, outer))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, 0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1, 0.02)
        nn.init.zeros_(module.bias)
