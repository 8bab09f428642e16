"""The modules that are traced: a picture in, and out what the file gives."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatout.yolo.export.tails import Tail
from flatout.yolo.model.heads import Predictions
from flatout.yolo.model.network import Network

DECODED = "decoded"
"""Output of a file with NMS that is only there while it is compared."""


class Judged(NamedTuple):
    """An input and what the network itself says about it: what every file is compared with."""

    images: np.ndarray
    """float32 [B, 3, H, W], RGB in 0..1."""
    decoded: np.ndarray
    raw: list[np.ndarray]


class RawLevels(nn.Module):
    """One map [B, A, Y, X, 5 + C] per level (and head), before the logistic function."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(predict(self.network, x).raw)


class DecodedBoxes(nn.Module):
    """[B, N, 5 + C]: cx, cy, w, h in pixels of the input, objectness and class scores in 0..1."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return predict(self.network, x).decoded


class WithTail(nn.Module):
    """What a tail makes of the boxes, then the boxes themselves."""

    def __init__(self, network: Network, tail: Tail) -> None:
        super().__init__()
        self.network, self.tail = network, tail

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        decoded = predict(self.network, x).decoded
        return (*self.tail(decoded), decoded)


class Visible(nn.Module):
    """What a runtime without plugins can compute of it; to be timed."""

    def __init__(self, network: Network, tail: Tail) -> None:
        super().__init__()
        self.network, self.tail = network, tail

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        decoded = predict(self.network, x).decoded
        return self.tail.visible(decoded) or (decoded,)


@torch.no_grad()
def judge(network: Network, images: np.ndarray) -> Judged:
    """What the network says in its own precision, in evaluation mode on the CPU."""
    found = predict(network, torch.from_numpy(images).to(network.head.anchor_grid.dtype))
    return Judged(images, found.decoded.numpy(), [level.numpy() for level in found.raw])


def predict(network: Network, x: Tensor) -> Predictions:
    """In evaluation mode."""
    found = network(x)
    assert isinstance(found, Predictions), "the network is in training mode"
    return found
