"""Scenes of rectangles, and a network that finds every rectangle of its input exactly: what is left is the tiling."""

from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from flatout.yolo.data.image_set import ImageSet, Labels
from flatout.yolo.model.layers import Predictions

GREYS = (100, 200)
"""Grey value of each class; the background is 0."""
NUM_BOXES = 64


def scene(height: int, width: int, boxes: list[tuple[int, int, int, int, int]]) -> np.ndarray:
    """Rectangles (left, top, right, bottom, class) on black, uint8 [H, W, 3]."""
    image = np.zeros((height, width, 3), np.uint8)
    for left, top, right, bottom, kind in boxes:
        image[top:bottom, left:right] = GREYS[kind]
    return image


def tiled_set(folder: Path, scenes, sizes) -> ImageSet:
    """Scenes as image files, with their rectangles as labels."""
    folder.mkdir(parents=True, exist_ok=True)
    labels, counts = [], []
    for number, (boxes, (height, width)) in enumerate(zip(scenes, sizes, strict=True)):
        cv2.imwrite(str(folder / f"{number}.png"), scene(height, width, boxes))
        rows = [
            [k, (a + c) / 2 / width, (b + d) / 2 / height, (c - a) / width, (d - b) / height] for a, b, c, d, k in boxes
        ]
        labels += rows
        counts.append(len(rows))
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return ImageSet(
        tuple(str(folder / f"{number}.png") for number in range(len(sizes))),
        np.array([(width, height) for height, width in sizes], np.int32),
        Labels(
            np.array(labels, np.float32).reshape(-1, 5),
            first,
            np.zeros((0, 2), np.float32),
            np.zeros(len(labels) + 1, np.int64),
        ),
        ("dark", "light"),
    )


def random_boxes(
    rng: np.random.Generator, height: int, width: int, *, count: int, sides: tuple[int, int], gap: int = 4
):
    """Rectangles with at least `gap` pixels between them."""
    found: list[tuple[int, int, int, int, int]] = []
    for _ in range(count * 10):
        w, h = rng.integers(*sides, 2, endpoint=True).tolist()
        if w > width or h > height:
            continue
        left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        apart = (
            left >= right + gap or left + w + gap <= other or top >= bottom + gap or top + h + gap <= upper
            for other, upper, right, bottom, _ in found
        )
        if all(apart) and len(found) < count:
            found.append((left, top, left + w, top + h, int(rng.integers(len(GREYS)))))
    return found


def find_rectangles(images_B3hw: Tensor) -> Tensor:
    """Predictions [B, NUM_BOXES, 5 + classes]; parts of a rectangle score higher than the whole, to make it hard."""
    out = torch.zeros(len(images_B3hw), NUM_BOXES, 5 + len(GREYS))
    for predicted, image in zip(out, images_B3hw.cpu().numpy(), strict=True):
        row = 0
        for kind, grey in enumerate(GREYS):
            _, _, stats, _ = cv2.connectedComponentsWithStats((image[0] == grey).astype(np.uint8))
            for left, top, width, height, _ in stats[1:].tolist():
                score = 0.9 - 1e-4 * width * height / image[0].size
                probabilities = [float(kind == each) for each in range(len(GREYS))]
                predicted[row] = torch.tensor(
                    [left + width / 2, top + height / 2, width, height, score, *probabilities]
                )
                row += 1
    return out


class RectangleNetwork(nn.Module):
    """`find_rectangles` as a network, for floats from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Predictions:
        return Predictions(find_rectangles((x * 255).round()), [])
