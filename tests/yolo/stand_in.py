"""A few generated images at the paths of COCO, for commands that expect COCO."""

from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np

NUM_CLASSES = 80
SPLITS = ("train2017", "val2017")


def write_fake_coco(folder: Path, *, size: int, num_images: Mapping[str, int], lists: bool = False) -> None:
    """Write images to `images/<split>`, labels to `labels/<split>`; with `lists` also `<split>.txt`, as in YOLOv7."""
    rng = np.random.default_rng(size)
    for split, count in num_images.items():
        assert split in SPLITS
        names = [f"{number:012}" for number in range(count)]
        for name in names:
            image, lines = random_scene(rng, size)
            _write(folder / "labels" / split / f"{name}.txt", "\n".join(lines).encode())
            _write(folder / "images" / split / f"{name}.jpg", cv2.imencode(".jpg", image)[1].tobytes())
        if lists:
            _write(folder / f"{split}.txt", "".join(f"./images/{split}/{name}.jpg\n" for name in names).encode())


def random_scene(rng: np.random.Generator, size: int) -> tuple[np.ndarray, list[str]]:
    """Filled rectangles on noise, uint8 [3/4 size, size, 3], and their label lines."""
    height, width = size * 3 // 4, size
    image = rng.integers(60, 120, (height, width, 3), np.uint8)
    lines = []
    for _ in range(3):
        box_w, box_h = rng.uniform(0.2, 0.6, 2)
        x, y = rng.uniform(box_w / 2, 1 - box_w / 2), rng.uniform(box_h / 2, 1 - box_h / 2)
        low, high = ((int((x + s * box_w / 2) * width), int((y + s * box_h / 2) * height)) for s in (-1, 1))
        cv2.rectangle(image, low, high, rng.integers(0, 255, 3).tolist(), cv2.FILLED)
        lines.append(f"{rng.integers(NUM_CLASSES)} {x:.6f} {y:.6f} {box_w:.6f} {box_h:.6f}")
    return image, lines


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
