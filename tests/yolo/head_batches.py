"""Random joined maps of several heads with targets, for tests and benchmarks of the loss router."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.loss import Anchors
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.multihead.head_config import HeadConfig, HeadGroup
from tests.yolo.detection_batch import make_anchors, make_map, make_targets


class HeadBatch(NamedTuple):
    """The inputs of a router loss."""

    maps: list[Tensor]
    targets: Tensor
    anchors: Anchors

    def with_gradient(self) -> "HeadBatch":
        return self._replace(maps=[each.detach().clone().requires_grad_() for each in self.maps])


def narrow_network(name: str, groups: HeadConfig | None, *, nc: int | None = None) -> Network:
    """A shipped network with an eighth of its channels."""
    config = load_config(name)
    assert isinstance(config, dict)
    return build_network({**config, "nc": groups.nc if groups else nc, "width_multiple": 0.125}, heads=groups)


def make_groups(
    classes_H: Sequence[Sequence[int]], weight_H: Sequence[float] = (), *, full_head: bool = False
) -> HeadConfig:
    weights = weight_H or [1.0] * len(classes_H)
    groups = [HeadGroup(tuple(classes), weight) for classes, weight in zip(classes_H, weights, strict=True)]
    return HeadConfig(sum(map(len, classes_H)), tuple(groups), full_head=full_head)


def joined(maps_by_head: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Joined maps, per level [B, N, Y, X], as from MultiHeadDetect, from maps per head and level [B, A, Y, X, O]."""
    levels = zip(*maps_by_head, strict=True)
    planes = ([one.permute(0, 1, 4, 2, 3) for one in level] for level in levels)
    return [
        torch.cat(
            [torch.cat((one[:, :, :4], one[:, :, 5:]), 2).flatten(1, 2) for one in level]
            + [one[:, :, 4] for one in level],
            1,
        )
        for level in planes
    ]


def make_head_batch(
    boxes_per_image: Sequence[int], groups: HeadConfig, *, height: int = 128, width: int = 128, seed: int = 0
) -> HeadBatch:
    generator = torch.Generator().manual_seed(seed)
    anchors, num_images = make_anchors(3), len(boxes_per_image)
    maps_by_head = [
        [make_map(num_images, height // int(s), width // int(s), outputs - 5, generator) for s in anchors.strides_px]
        for outputs in groups.outputs_H
    ]
    return HeadBatch(joined(maps_by_head), make_targets(boxes_per_image, groups.nc, generator), anchors)


def by_head(maps: Sequence[Tensor], groups: HeadConfig) -> list[list[Tensor]]:
    """The inverse of `joined`."""
    widths = [3 * (outputs - 1) for outputs in groups.outputs_H] + [3] * groups.num_heads
    parts = [each.split(widths, 1) for each in maps]
    return [
        [_head_map(part[head].unflatten(1, (3, -1)), part[groups.num_heads + head]) for part in parts]
        for head in range(groups.num_heads)
    ]


def _head_map(others: Tensor, objectness: Tensor) -> Tensor:
    """A map [B, A, Y, X, O] from boxes and classes [B, A, O - 1, Y, X] and objectness [B, A, Y, X]."""
    return torch.cat((others[:, :, :4], objectness[:, :, None], others[:, :, 4:]), 2).permute(0, 1, 3, 4, 2)
