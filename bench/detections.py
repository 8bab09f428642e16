"""Random prediction maps and targets like those early in a training, for the benchmarks of the loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.loss import Anchors

STRIDES_PX = (8.0, 16.0, 32.0)
ANCHORS_PX = [[12, 16, 19, 36, 40, 28], [36, 75, 76, 55, 72, 146], [142, 110, 192, 243, 459, 401]]
CLASSES = 80


class Case(NamedTuple):
    """A step's input: maps with gradient, [T, 6] targets, anchors."""

    maps: list[Tensor]
    targets: Tensor
    anchors: Anchors


def make_case(
    batch_size: int, boxes: int, size_px: int, *, device: str, dtype: torch.dtype = torch.float32, crowd: int = 0
) -> Case:
    """`boxes` boxes in every image, about as large as those of COCO, and `crowd` more in the first; 80 classes."""
    generator = torch.Generator(device).manual_seed(batch_size * 1000 + boxes)
    maps = []
    for stride in STRIDES_PX:
        side = size_px // int(stride)
        one_map = torch.empty(batch_size, 3, side, side, 5 + CLASSES, device=device, dtype=dtype)
        one_map.normal_(generator=generator)
        one_map[..., 4:] -= 3
        maps.append(one_map.requires_grad_())
    image = torch.arange(batch_size, device=device).repeat_interleave(boxes)
    image = torch.cat((image.new_zeros(crowd), image))
    targets = torch.rand(len(image), 6, device=device, generator=generator)
    targets[:, 0] = image
    targets[:, 1] = (targets[:, 1] * CLASSES).floor()
    targets[:, 4:].normal_(-2.0, 0.9, generator=generator).exp_().clamp_(max=0.95)
    anchors_px = torch.tensor(ANCHORS_PX, dtype=torch.float32, device=device).view(3, 3, 2)
    return Case(maps, targets, Anchors(anchors_px / torch.tensor(STRIDES_PX, device=device)[:, None, None], STRIDES_PX))
