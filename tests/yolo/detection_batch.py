"""Random prediction maps and targets for the tests and benchmarks of assignment and loss."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.loss import Anchors

ANCHORS_PX = {
    3: [[12, 16, 19, 36, 40, 28], [36, 75, 76, 55, 72, 146], [142, 110, 192, 243, 459, 401]],
    4: [
        [19, 27, 44, 40, 38, 94],
        [96, 68, 86, 152, 180, 137],
        [140, 301, 303, 264, 238, 542],
        [436, 615, 739, 380, 925, 792],
    ],
}
STRIDES_PX = (8.0, 16.0, 32.0, 64.0)


class DetectionBatch(NamedTuple):
    """The inputs of a loss."""

    maps: list[Tensor]
    targets: Tensor
    anchors: Anchors


def make_anchors(num_layers: int, device: str | torch.device = "cpu") -> Anchors:
    """YOLOv7's anchors for three or four layers, in cells."""
    strides_px = STRIDES_PX[:num_layers]
    size_px = torch.tensor(ANCHORS_PX[num_layers], dtype=torch.float32, device=device).view(num_layers, 3, 2)
    return Anchors(size_px / torch.tensor(strides_px, device=device)[:, None, None], strides_px)


def make_batch(
    boxes_per_image: Sequence[int],
    *,
    height: int = 128,
    width: int = 128,
    num_classes: int = 3,
    num_layers: int = 3,
    seed: int = 0,
) -> DetectionBatch:
    """Logits similar to those of a network early in training, some of them confident, and boxes of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    maps = [
        make_map(len(boxes_per_image), height // int(stride), width // int(stride), num_classes, generator)
        for stride in STRIDES_PX[:num_layers]
    ]
    targets = make_targets(boxes_per_image, num_classes, generator)
    return DetectionBatch(maps, targets, make_anchors(num_layers))


def make_map(num_images: int, rows: int, columns: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """One raw prediction map; about every tenth cell is confident."""
    one_map = torch.randn(num_images, 3, rows, columns, 5 + num_classes, generator=generator)
    one_map[..., 4:] -= 2
    confident = torch.rand(one_map.shape[:4], generator=generator) < 0.1
    one_map[..., 4:] += 3 * confident[..., None]
    return one_map


def make_targets(boxes_per_image: Sequence[int], num_classes: int, generator: torch.Generator) -> Tensor:
    """Targets [T, 6], sorted by image."""
    image_T = torch.arange(len(boxes_per_image)).repeat_interleave(torch.tensor(boxes_per_image))
    class_T = torch.randint(num_classes, image_T.shape, generator=generator)
    centre_T2 = torch.rand(len(image_T), 2, generator=generator)
    size_T2 = torch.exp(0.8 * torch.randn(len(image_T), 2, generator=generator) - 1.7).clamp(max=0.99)
    return torch.cat((torch.stack((image_T, class_T), 1), centre_T2, size_T2), 1)


def awkward(targets: Tensor, *, seed: int) -> Tensor:
    """The targets with repeated rows, centres on borders and cell edges, and boxes that fit no anchor."""
    generator = torch.Generator().manual_seed(seed)
    targets, kind = targets.clone(), torch.randint(8, (len(targets),), generator=generator)
    targets[kind == 0, 2:4] = torch.randint(2, (int((kind == 0).sum()), 2), generator=generator).float()
    targets[kind == 1, 2:4] = (targets[kind == 1, 2:4] * 16).round() / 16
    targets[kind == 2, 2:4] = (targets[kind == 2, 2:4] * 16).floor() / 16 + 1 / 32
    targets[kind == 3, 4:6] = targets[kind == 3, 4:6] * 1e-3
    repeated = targets[kind == 4]
    other_class = targets[kind == 5].clone()
    other_class[:, 1] = 0
    return torch.cat((targets, repeated, other_class))
