"""The parts of the network: gated blocks without activations (after NAFNet, arXiv 2204.04676), and mixing over time.

Dimension key:  N frames   C channels   H W feature map   L frames of a clip
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.norm(x_NCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class GatedBlock(nn.Module):
    """norm, widen, 3 x 3 per channel, gate, channel attention, narrow; then norm, widen, gate, narrow.

    Both halves are added to their input with a learned factor per channel that begins at 0.
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
    """Each frame takes from its neighbours in the clip; the first and last see themselves in place of a missing one."""

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
    """Continued at the right and the bottom by mirroring, or by repeating the last pixel where too little is there."""
    down, right = shape_hw[0] - x_NCHW.shape[2], shape_hw[1] - x_NCHW.shape[3]
    if not down and not right:
        return x_NCHW
    mode = "reflect" if down < x_NCHW.shape[2] and right < x_NCHW.shape[3] else "replicate"
    return F.pad(x_NCHW, (0, right, 0, down), mode=mode)


def _gate(x_NCHW: Tensor) -> Tensor:
    a, b = x_NCHW.chunk(2, dim=1)
    return a * b
