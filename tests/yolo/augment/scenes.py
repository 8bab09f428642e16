"""Helpers of the augmentation tests: data sets in memory, and draws with given values."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.feed.source import DecodeError, Fetch, Out, Rows, RowsOut, Source
from flatout.yolo.augment.draw import FOUR, NINE, NONE, PASTE_ATTEMPTS, PLAIN, AugmentConfig
from flatout.yolo.data.image_set import ImageSet, Labels
from flatout.yolo.data.letterbox import resize_long_side
from tests.yolo.pattern import pattern

if TYPE_CHECKING:
    from flatout.yolo.augment.paint import Painter
    from flatout.yolo.augment.source import Renderer

UNWARPED = (0, 0, 0, 1, 0, 0, 0.5, 0.5)
SMALL_TILE = 40


def labels_of(boxes: Sequence[np.ndarray], polygons: Sequence[Sequence[np.ndarray]] | None = None) -> Labels:
    """Labels of images with boxes [n, 5], and one polygon per box where an image has any."""
    per_label: list[np.ndarray] = []
    for number, box_n5 in enumerate(boxes):
        own = list(polygons[number]) if polygons is not None else []
        assert len(own) in (0, len(box_n5))
        per_label += own or [np.zeros((0, 2), np.float32)] * len(box_n5)
    counts = [len(box_n5) for box_n5 in boxes]
    return Labels(
        np.concatenate([np.zeros((0, 5), np.float32), *boxes]).astype(np.float32),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        np.concatenate([np.zeros((0, 2), np.float32), *per_label]).astype(np.float32),
        np.concatenate(([0], np.cumsum([len(points) for points in per_label]))).astype(np.int64),
    )


def renderer_of(
    images: Sequence[np.ndarray],
    labels: Labels,
    config: AugmentConfig,
    *,
    size: int,
    painter: "Painter | None" = None,
    **more: Any,
) -> "Renderer":
    """A renderer of images in their original size, which are resized here."""
    # Imported here, so that this module works without OpenCV for tests of the device.
    from flatout.yolo.augment.paint import Classic
    from flatout.yolo.augment.source import Renderer

    return Renderer(
        images=[resize_long_side(image, size, augment=True).image for image in images],
        size_wh_N2=np.array([image.shape[1::-1] for image in images]),
        labels=labels,
        config=config,
        size=size,
        painter=painter or Classic(),
        **more,
    )


class Damaged:
    """Images of which some cannot be decoded."""

    def __init__(self, images: Sequence[np.ndarray], damaged: Iterable[int]) -> None:
        self.images = images
        self.damaged = set(damaged)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> np.ndarray:
        if index in self.damaged:
            raise DecodeError("a damaged image")
        return self.images[index]


def image_set_of(images: Sequence[np.ndarray], labels: Labels) -> ImageSet:
    return ImageSet(
        tuple(f"image {number}" for number in range(len(images))),
        np.array([image.shape[1::-1] for image in images], np.int32),
        labels,
        ("thing", "other thing"),
    )


def parameters_of(source: Source, positions: np.ndarray, *, seed: int = 1, epoch: int = 0) -> dict[str, np.ndarray]:
    """What a source writes for samples `positions` of an epoch that shows the images in their order."""
    indices = positions % len(source)
    return written(source, indices, source.draw(seed, epoch, positions, indices))


def written(
    source: Source,
    indices: np.ndarray,
    draws: Mapping[str, np.ndarray],
    *,
    first_row: int = 0,
    fetch: Fetch | None = None,
) -> dict[str, np.ndarray]:
    """What a source writes for drawn samples, from row `first_row` of their batch on."""
    num = len(indices)
    parts = {
        name: RowsOut(name, field, num) if isinstance(field, Rows) else np.empty((num, *field.shape), field.dtype)
        for name, field in source.fields.items()
    }
    source.read(indices, draws, Out(parts, first_row=first_row, fetch=fetch))
    return {
        name: np.concatenate([rows for rows in part.taken if rows is not None]) if isinstance(part, RowsOut) else part
        for name, part in parts.items()
    }


def one_draw(canvases: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, np.ndarray]:
    """Draws of one sample from given canvases: {"tiles": [...], "centre": (x, y), "warp": [8 numbers], "key": 0}."""
    draws = {
        "kind": np.full((1, 2), NONE, np.int8),
        "tiles": np.full((1, 2, 9), -1),
        "centre": np.zeros((1, 2, 2)),
        "warp": np.zeros((1, 2, 8)),
        "aspect": np.ones((1, 2)),
        "copy_key": np.zeros((1, 2), np.uint64),
        "mix": np.ones(1),
        "hsv": np.ones((1, 3)),
        "flip": np.zeros((1, 2), bool),
        "paste": np.zeros(1, bool),
        "paste_tiles": np.zeros((1, 0, 4), np.int64),
        "paste_centre": np.zeros((1, 0, 2)),
        "paste_key": np.zeros((1, 0), np.uint64),
        "paste_tries": np.zeros((1, PASTE_ATTEMPTS, 6)),
    }
    for layer, canvas in enumerate(canvases):
        assert len(canvas["tiles"]) in (PLAIN, FOUR, NINE)
        draws["kind"][0, layer] = len(canvas["tiles"])
        draws["tiles"][0, layer, : len(canvas["tiles"])] = canvas["tiles"]
        draws["centre"][0, layer] = canvas.get("centre", (0, 0))
        draws["warp"][0, layer] = canvas.get("warp", UNWARPED)
        draws["copy_key"][0, layer] = canvas.get("key", 0)
    return draws | {name: np.asarray(value)[None] for name, value in more.items()}


def busy_set(
    num_images: int, *, seed: int, polygons: str = "none", largest: int = 120
) -> tuple[list[np.ndarray], Labels]:
    """Images of many sizes with 0 to 6 labels each; polygons for "none", "all" or "some" of the images."""
    rng = np.random.default_rng(seed)
    images, boxes, outlines = [], [], []
    for number in range(num_images):
        height, width = rng.integers(SMALL_TILE, largest, 2)
        noise = rng.integers(0, 256, (int(height), int(width), 3)).astype(np.uint8)
        # A smooth half and a rough half: both the mean and the worst case of interpolation.
        images.append(np.where(np.arange(width)[:, None] < width // 2, noise, pattern(int(height), int(width), number)))
        centre, size = rng.uniform(0.2, 0.8, (int(rng.integers(0, 7)), 2)), rng.uniform(0.03, 0.4, 2)
        angles = np.linspace(0, 2 * np.pi, int(rng.integers(3, 12)), endpoint=False)
        own = [np.clip(c + size / 2 * np.stack((np.cos(angles), np.sin(angles)), 1), 0, 1) for c in centre]
        low = np.array([points.min(0) for points in own]).reshape(-1, 2)
        high = np.array([points.max(0) for points in own]).reshape(-1, 2)
        classes = rng.integers(0, 2, (len(own), 1))
        boxes.append(np.concatenate((classes, (low + high) / 2, high - low), axis=1).astype(np.float32))
        with_polygons = polygons == "all" or (polygons == "some" and number % 2 == 0)
        outlines.append([points.astype(np.float32) for points in own] if with_polygons else [])
    return images, labels_of(boxes, outlines)
