"""CBAM: a map's channels weighted by what they hold overall, then its places by what all channels hold there.

Names of parameters are those of YOLOv7fast's checkpoints. Maps are [B, C, Y, X].
"""

import torch
from torch import Tensor, nn

REDUCTION = 16
WINDOW = 7


class ChannelAttention(nn.Module):
    """One factor per channel, [B, C, 1, 1], from its mean and its maximum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(channels // REDUCTION, 1)
        self.fc = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False), nn.ReLU(), nn.Conv2d(hidden, channels, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        factor: Tensor = self.fc(x.mean((2, 3), keepdim=True)) + self.fc(x.amax((2, 3), keepdim=True))
        return factor.sigmoid()


class SpatialAttention(nn.Module):
    """One factor per place, [B, 1, Y, X], from the mean and the maximum over its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, WINDOW, padding=WINDOW // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        factor: Tensor = self.conv(torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1))
        return factor.sigmoid()


class CBAM(nn.Module):
    """Channel attention, then spatial attention."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channel_attention = ChannelAttention(channels)
        self.spatial_attention = SpatialAttention()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.channel_attention(x)
        y: Tensor = x * self.spatial_attention(x)
        return y
