"""The deblurring network: maps the frames and spikes of a clip to sharp frames.

    blur --> level 0 --> level 1 --> ... --> middle --> ... --> level 1 --> level 0 --> + blur --> sharp
                            |                                                          |
    spikes --> branch ------+---------------------- shortcut: 3 x 3, pixel shuffle ----+

That is the kind `branch`. The kind `stacked` has no branch: frames are rearranged to the resolution of spikes, and both
enter the first layer together, so that every layer sees all spikes, at a quarter of the pixels:

    blur --> 2 x 2 pixels as 12 channels --+--> level 0 --> ... --> level 0 --> pixel shuffle --> + blur --> sharp
    spikes --------------------------------/

A U-Net of gated blocks processes each frame; the spike branch joins at the level whose feature map has its resolution.
Spike frames of GoPro-Spike are exactly half as large as RGB frames, so nothing is interpolated. Spikes are given as
their mean over time and the differences from it, so that a static scene adds no disturbance. On one simulated batch,
the loss fell by 22 % in 50 steps with these differences and the shortcut, and not at all without.

Names of modules are keys of checkpoints and must not change.

Dimension key:  N frames, or clips where followed by L   L frames of a clip   C channels   H W feature map or frame
                h w spike frame
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.config import build_config
from flatout.spike.config import ModelConfig, plain_values


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.norm(x_NCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class GatedBlock(nn.Module):
    """Norm, widen, depthwise 3 x 3, gate, channel attention, narrow; then norm, widen, gate, narrow.

    The result of each half is added to its input, scaled by a learned factor per channel that is initialised to 0.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(channels), ChannelNorm(channels)
        self.widen1, self.widen2 = (nn.Conv2d(channels, 2 * channels, 1) for _ in range(2))
        self.depthwise = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels)
        self.attention = nn.Conv2d(channels, channels, 1)
        self.narrow1, self.narrow2 = (nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.scale1, self.scale2 = (nn.Parameter(torch.zeros(channels, 1, 1)) for _ in range(2))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y = _gate(self.depthwise(self.widen1(self.norm1(x_NCHW))))
        y = y * self.attention(y.mean(dim=(2, 3), keepdim=True))
        x_NCHW = x_NCHW + self.narrow1(y) * self.scale1
        y = _gate(self.widen2(self.norm2(x_NCHW)))
        return x_NCHW + self.narrow2(y) * self.scale2  # type: ignore[no-any-return]


class TimeMix(nn.Module):
    """Mixes each frame with its neighbours in the clip; a missing neighbour is replaced by the frame itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.mix = nn.Conv2d(3 * channels, channels, 1)
        self.scale = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x_NCHW: Tensor, length: int) -> Tensor:
        clips = self.norm(x_NCHW).unflatten(0, (-1, length))
        before = torch.cat((clips[:, :1], clips[:, :-1]), 1)
        after = torch.cat((clips[:, 1:], clips[:, -1:]), 1)
        mixed = self.mix(torch.cat((before, clips, after), 2).flatten(0, 1))
        return x_NCHW + mixed * self.scale  # type: ignore[no-any-return]


def padded(x_NCHW: Tensor, shape_hw: tuple[int, int]) -> Tensor:
    """Pad at the right and the bottom by reflection, or by repeating the last pixel if the input is too small."""
    down, right = shape_hw[0] - x_NCHW.shape[2], shape_hw[1] - x_NCHW.shape[3]
    if not down and not right:
        return x_NCHW
    mode = "reflect" if down < x_NCHW.shape[2] and right < x_NCHW.shape[3] else "replicate"
    return F.pad(x_NCHW, (0, right, 0, down), mode=mode)


def _gate(x_NCHW: Tensor) -> Tensor:
    a, b = x_NCHW.chunk(2, dim=1)
    return a * b


SPREAD = 4.0
"""Factor that scales the differences of rates between bins to a standard deviation near 1."""


class Clip(NamedTuple):
    """The input of the network."""

    blur: Tensor
    """[N, L, 3, H, W] in 0..1."""
    spikes: Tensor
    """[N, L, C, h, w]."""


class DeblurNet(nn.Module):
    """Maps a clip of any size and any number of frames to sharp frames [N, L, 3, H, W]."""

    def __init__(self, config: ModelConfig, *, channels: int, ratio: float = 2.0, ratio_x: float | None = None) -> None:
        """`channels` of spikes; `ratio`: RGB pixels per spike pixel, which decides where spikes join; `ratio_x`: the
        same across, if it is another."""
        super().__init__()
        self.spec: dict[str, Any] = {"channels": channels, "ratio": ratio, "model": _model_values(config)}
        if ratio_x not in (None, ratio):
            self.spec["ratio_x"] = ratio_x
        self._num_levels = len(config.ENC_BLOCKS)
        self._is_stacked = config.KIND == "stacked"
        has_branch = config.USE_SPIKE and not self._is_stacked
        self._join = _join_level(ratio, self._num_levels) if has_branch else -1
        self._uses_spikes = config.USE_SPIKE
        self._fold = max(1, round(ratio)) if self._is_stacked else 1
        frame_channels = 3 * self._fold**2
        widths = [config.WIDTH * 2**level for level in range(self._num_levels + 1)]
        spike_channels = channels + 1 if self._is_stacked and config.USE_SPIKE else 0
        self.intro = nn.Conv2d(frame_channels + spike_channels, widths[0], 3, padding=1)
        self.down_blocks = nn.ModuleList(map(_blocks, widths, config.ENC_BLOCKS))
        self.downs = nn.ModuleList(nn.Conv2d(width, 2 * width, 2, 2) for width in widths[:-1])
        self.middle = _blocks(widths[-1], config.MIDDLE_BLOCKS)
        self.ups = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * width, 4 * width, 1, bias=False), nn.PixelShuffle(2))
            for width in reversed(widths[:-1])
        )
        self.up_blocks = nn.ModuleList(map(_blocks, reversed(widths[:-1]), config.DEC_BLOCKS))
        self.ending = nn.Conv2d(widths[0], frame_channels, 3, padding=1)
        _zero_init(self.ending)  # so that the network is initially the identity
        if has_branch:
            width, scale = widths[self._join], 2**self._join
            self.spike_branch = nn.Sequential(
                nn.Conv2d(channels + 1, width, 3, padding=1), *(GatedBlock(width) for _ in range(config.SPIKE_BLOCKS))
            )
            self.join = nn.Conv2d(2 * width, width, 1)
            short = nn.Conv2d(width, 3 * scale**2, 3, padding=1)
            _zero_init(short)
            self.short_way = nn.Sequential(short, nn.PixelShuffle(scale))
        mixed_levels = (1, self._num_levels) if config.TEMPORAL else ()
        self.time_mixes = nn.ModuleDict({str(level): TimeMix(widths[level]) for level in mixed_levels})

    def forward(self, clip: Clip) -> Tensor:
        blur, spikes = clip
        num, length, _, height, width = blur.shape
        grid = self._fold * 2**self._num_levels
        # Not -(-height // grid): in an exported file, a quotient below 0 is rounded towards 0.
        shape_hw = ((height + grid - 1) // grid * grid, (width + grid - 1) // grid * grid)
        frames = padded(blur.flatten(0, 1), shape_hw)
        x = F.pixel_unshuffle(frames, self._fold) if self._is_stacked else frames
        if self._is_stacked and self._uses_spikes:
            x = torch.cat((x, self._spike_inputs(spikes.flatten(0, 1), (height, width), self._fold, x)), 1)
        x = self.intro(x)
        result = frames
        skips = []
        for level, (blocks, down) in enumerate(zip(self.down_blocks, self.downs, strict=True)):
            if level == self._join:
                inputs = self._spike_inputs(spikes.flatten(0, 1), (height, width), 2**self._join, x)
                features = self.spike_branch(inputs)
                x = self.join(torch.cat((x, features), 1))
                result = result + self.short_way(features)
            x = self._mixed(blocks(x), level, length)
            skips.append(x)
            x = down(x)
        x = self._mixed(self.middle(x), self._num_levels, length)
        for up, blocks, skip in zip(self.ups, self.up_blocks, reversed(skips), strict=True):
            x = blocks(up(x) + skip)
        change = self.ending(x)
        if self._is_stacked:
            change = F.pixel_shuffle(change, self._fold)
        sharp: Tensor = (change + result)[..., :height, :width]
        return sharp.reshape(num, length, *sharp.shape[1:])

    def _spike_inputs(self, spikes: Tensor, frame_hw: tuple[int, int], scale: int, like_NCHW: Tensor) -> Tensor:
        """Spikes as their mean and the differences from it, padded to the size of `like_NCHW`.

        `frame_hw` is the size of the frame before padding, `scale` its pixels per pixel of the result.
        """
        expected = (frame_hw[0] // scale, frame_hw[1] // scale)
        if spikes.shape[2:] != expected:  # the spikes have another resolution
            spikes = F.interpolate(spikes, expected, mode="bilinear", align_corners=False)
        mean = spikes.mean(1, keepdim=True)
        inputs = torch.cat((SPREAD * (spikes - mean), mean), 1)
        return padded(inputs, (like_NCHW.shape[2], like_NCHW.shape[3]))

    def _mixed(self, x: Tensor, level: int, length: int) -> Tensor:
        return self.time_mixes[str(level)](x, length) if str(level) in self.time_mixes else x


def network_from(spec: Mapping[str, Any]) -> DeblurNet:
    """Build the network that a spec from a weights file describes; ConfigError if it describes none."""
    model = build_config(spec["model"], ModelConfig, where="network")
    return DeblurNet(model, channels=spec["channels"], ratio=spec["ratio"], ratio_x=spec.get("ratio_x"))


NETWORK_KEYS = ("KIND", "USE_SPIKE", "WIDTH", "ENC_BLOCKS", "MIDDLE_BLOCKS", "DEC_BLOCKS", "SPIKE_BLOCKS", "TEMPORAL")


def _model_values(config: ModelConfig) -> dict[str, Any]:
    return {key: plain_values(getattr(config, key)) for key in NETWORK_KEYS}


def _zero_init(layer: nn.Conv2d) -> None:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _blocks(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(GatedBlock(width) for _ in range(count)))


def _join_level(ratio: float, num_levels: int) -> int:
    """The level whose feature maps have the resolution of the spikes; level 1 if there is none."""
    level = math.log2(ratio) if ratio > 0 else -1.0
    return int(level) if level.is_integer() and 0 <= level < num_levels else 1
