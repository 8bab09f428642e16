"""Random predictions and options for tests of NMS."""

import torch

VALIDATION = {"conf_thres": 0.001, "iou_thres": 0.65, "multi_label": True}
OPTIONS = [
    {},
    VALIDATION,
    VALIDATION | {"agnostic": True},
    VALIDATION | {"classes": (1, 2, 77)},
    VALIDATION | {"max_det": 7},
    VALIDATION | {"max_nms": 100},
    {"max_nms": 20, "conf_thres": 0.01},
    {"conf_thres": 0.0, "iou_thres": 0.0, "multi_label": True},
    {"conf_thres": 0.01, "iou_thres": 1.0},
    {"classes": ()},
]


def draw(num_images: int, num_boxes: int, num_classes: int, seed: int, size_px: float = 640) -> torch.Tensor:
    """Random predictions, half of them clustered around four points per image."""
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    place = rand(num_images, 4, 2) * size_px
    which = (rand(num_images, num_boxes) * 4).long()
    near = torch.gather(place, 1, which[..., None].expand(-1, -1, 2)) + 6 * rand(num_images, num_boxes, 2)
    centre = torch.where(rand(num_images, num_boxes, 1) < 0.5, near, rand(num_images, num_boxes, 2) * size_px)
    size = 20 + 60 * rand(num_images, num_boxes, 2)
    return torch.cat((centre, size, rand(num_images, num_boxes, 1), rand(num_images, num_boxes, num_classes) ** 4), 2)
