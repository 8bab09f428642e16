"""Detection layers with several heads (1B4H), with or without attention.

Each head has its own parameters and classes. Parameters are kept per head, under the names of YOLOv7fast's checkpoints,
and joined when the layer runs: one convolution per level gives the outputs of all heads at once (bench/multihead.py
compares it with one per head). The loss reads the joined maps directly; `by_head` splits them into maps of the heads.

Dimension key:  B images   H heads   A anchors per level   Y, X rows and columns of a level
                C classes (in attention modules: channels)   O = 5 + the classes a head predicts
                N = A * sum of O over the heads, the channels of a joined map   K = sum over levels of A * Y * X
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.yolo.model.layers import Detect, Predictions, prediction_convs
from flatout.yolo.model.spec import Head
from flatout.yolo.multihead.head_config import HeadConfig, channels_of_outputs

# CBAM: channel attention, then spatial attention, on maps [B, C, Y, X], with the parameter names of YOLOv7fast

REDUCTION = 16
WINDOW = 7


class ChannelAttention(nn.Module):
    """One factor per channel, [B, C, 1, 1], from the mean and the maximum of its values."""

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
    """One factor per pixel, [B, 1, Y, X], from the mean and the maximum over its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, WINDOW, padding=WINDOW // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        factor: Tensor = self.conv(torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1))
        return factor.sigmoid()


class CBAM(nn.Module):
    """A map multiplied by its channel attention, then by its spatial attention."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channel_attention = ChannelAttention(channels)
        self.spatial_attention = SpatialAttention()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.channel_attention(x)
        y: Tensor = x * self.spatial_attention(x)
        return y


# Detection layers


class MultiHeadDetect(Detect):
    """A detection layer with several heads.

    In training it returns joined maps, per level [B, N, Y, X], with the order of channels of head_config.py. Otherwise
    it returns `Predictions`: `raw` has the joined maps, and `decoded` the boxes of all heads, head by head,
    [B, H * K, 5 + C], in the classes of the data set; the scores of other heads' classes are 0.
    """

    def _add_convolutions(self, head: Head) -> None:
        assert head.groups is not None
        self.groups = head.groups
        levels = head.channels[: self.nl]
        self.heads = nn.ModuleList(prediction_convs(levels, self.na * each) for each in self.groups.outputs_H)
        self._add_constants()

    columns_HC: Tensor
    """int64 [H, 5 + C]: index of each common output in a head's outputs; one past the end for other heads' classes."""
    channel_of_output_N: Tensor
    """int64: the channel in a joined map of each output of the heads' convolutions."""
    output_of_channel_N: Tensor
    """int64: the inverse of `channel_of_output_N`."""

    def _add_constants(self) -> None:
        channels = torch.tensor(channels_of_outputs(self.groups.outputs_H, self.na))
        self.register_buffer("columns_HC", _columns(self.groups), persistent=False)
        self.register_buffer("channel_of_output_N", channels, persistent=False)
        self.register_buffer("output_of_channel_N", channels.argsort(), persistent=False)

    def forward(self, xs: list[Tensor]) -> list[Tensor] | Predictions:
        maps = [self.predict(level, x) for level, x in enumerate(xs)]
        return maps if self.training else Predictions(self.decode(maps), maps)

    def folded_weights(self, level: int) -> tuple[Tensor, Tensor]:
        convs = self._level_convs(level)
        joined = torch.cat([conv.weight for conv in convs]), torch.cat([_bias(conv) for conv in convs])
        return joined[0][self.output_of_channel_N], joined[1][self.output_of_channel_N]

    def by_head(self, maps: list[Tensor]) -> list[list[Tensor]]:
        """Joined maps split by head and level: [B, A, Y, X, O]."""
        ordered = [joined.index_select(1, self.channel_of_output_N) for joined in maps]
        return [[self._head_map(head, each) for each in ordered] for head in range(self.groups.num_heads)]

    def decode(self, raw: list[Tensor]) -> Tensor:
        heads = [self._decoded_head(head, maps) for head, maps in enumerate(self.by_head(raw))]
        return torch.cat(heads, 1)

    def _decoded_head(self, head: int, maps: list[Tensor]) -> Tensor:
        """Boxes and scores of one head in the common classes, [B, K, 5 + C]."""
        local = super().decode(maps)
        if len(self.groups.heads[head].classes) == 1 and not self.groups.single_class_logit:
            # No loss trains the class output of a head with one class, so the score would be noise times objectness.
            local = torch.cat((local[..., :5], torch.ones_like(local[..., 5:])), -1)
        return F.pad(local, (0, 1)).index_select(-1, self.columns_HC[head])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.columns_HC.is_meta:
            # Built on the meta device; the file that fills the parameters does not have these constants.
            with torch.device(self.anchors.device):
                self._add_constants()

    def _head_map(self, head: int, ordered_BNYX: Tensor) -> Tensor:
        outputs_H = self.groups.outputs_H
        begin, width = self.na * sum(outputs_H[:head]), self.na * outputs_H[head]
        own = ordered_BNYX[:, begin : begin + width]
        # Not unflatten, which ONNX supports only from opset 13 on.
        split = own.view(own.shape[0], self.na, outputs_H[head], own.shape[2], own.shape[3])
        return split.permute(0, 1, 3, 4, 2)

    def _level_convs(self, level: int) -> list[nn.Conv2d]:
        """The convolutions of all heads for a level."""
        return [head[level] for head in self.heads]  # type: ignore[index]

    def _prediction_convs(self) -> list[nn.ModuleList]:
        return list(self.heads)  # type: ignore[arg-type]


class MultiHeadDetectAttention(MultiHeadDetect):
    """MultiHeadDetect with an attention module for every head and level."""

    def _add_convolutions(self, head: Head) -> None:
        super()._add_convolutions(head)
        self.attentions = nn.ModuleList(
            nn.ModuleList(CBAM(channels) for channels in head.channels[: self.nl]) for _ in self.heads
        )

    def predict(self, level: int, x: Tensor) -> Tensor:
        outputs = [
            F.conv2d(attention[level](x), conv.weight, conv.bias)  # type: ignore[index]
            for conv, attention in zip(self._level_convs(level), self.attentions, strict=True)
        ]
        return torch.cat(outputs, 1)[:, self.output_of_channel_N]


def _bias(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None
    return conv.bias


def _columns(groups: HeadConfig) -> Tensor:
    local = range(groups.nc) if groups.full_head else groups.local_C
    rows = []
    for head, num_outputs in enumerate(groups.outputs_H):
        own = [5 + local[each] if groups.head_C[each] == head else num_outputs for each in range(groups.nc)]
        rows.append([0, 1, 2, 3, 4, *own])
    return torch.tensor(rows)
