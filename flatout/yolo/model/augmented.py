"""Boxes from several views of a picture, and from several networks: test-time augmentation and ensembles."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.yolo.model.layers import Predictions
from flatout.yolo.model.network import Network

VIEWS = ((1.0, False), (0.83, True), (0.67, False))
"""Scale and left-right flip of each view."""

PADDING = 0.447
"""Grey of the padding: the mean brightness of ImageNet."""


def predict_augmented(network: nn.Module, x: Tensor, largest_stride: int) -> Tensor:
    """Boxes of all views in the frame of `x` [B, C, H, W], view after view, [B, K, O]."""
    width = x.shape[-1]
    return torch.cat([_boxes_of_view(network, x, scale, flip, largest_stride, width) for scale, flip in VIEWS], 1)


def _boxes_of_view(network: nn.Module, x: Tensor, scale: float, flip: bool, stride: int, width: int) -> Tensor:
    view = resize_and_pad(x.flip(-1) if flip else x, scale, stride)
    prediction: Predictions = network(view)
    centre, size, scores = prediction.decoded.split((2, 2, prediction.decoded.shape[-1] - 4), -1)
    # By the nominal scale, although the view's sides were rounded: YOLOv7 does so, and golden `tta` pins it.
    centre, size = centre / scale, size / scale
    if flip:
        centre = torch.stack((width - centre[..., 0], centre[..., 1]), -1)
    return torch.cat((centre, size, scores), -1)


def resize_and_pad(x: Tensor, scale: float, stride: int) -> Tensor:
    """`x` scaled bilinearly, then padded on the right and below to multiples of the stride."""
    if scale == 1.0:
        return x
    height, width = x.shape[-2:]
    small = F.interpolate(x, (int(height * scale), int(width * scale)), mode="bilinear", align_corners=False)
    full_height, full_width = (math.ceil(side * scale / stride) * stride for side in (height, width))
    return F.pad(small, [0, full_width - small.shape[-1], 0, full_height - small.shape[-2]], value=PADDING)


class Ensemble(nn.Module):
    """Several networks that look at the same picture; their boxes stand side by side for NMS to choose from."""

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        if len({network.nc for network in networks}) != 1:
            classes = ", ".join(str(network.nc) for network in networks)
            raise ValueError(f"the networks of an ensemble must know the same classes, not {classes} of them.")
        self.members = nn.ModuleList(networks)
        self.names = networks[-1].names
        self.stride = networks[-1].stride

    def forward(self, x: Tensor) -> Predictions:
        """Decoded boxes of all members; `raw` is empty."""
        return Predictions(torch.cat([member(x).decoded for member in self.members], 1), [])
