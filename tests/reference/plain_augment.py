"""The training recipe one item at a time, as a dataset for torch's DataLoader is usually written.

Mosaic of 4 or 9, warp, mixup, colour, flips, boxes: the plain twin of flatout.yolo.augment for benchmarks. It uses
OpenCV's kernels and NumPy per image; randomness comes from a generator, so its samples differ from flatout's.

Dimension key:  n boxes of an image
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import cv2
import numpy as np

GREY = 114


class PlainItems:
    """Items of `size` x `size` pixels from images that `load` gives, uint8 [h, w, 3] BGR, longer side `size`."""

    def __init__(
        self, load: Callable[[int], np.ndarray], boxes: list[np.ndarray], hyp: Mapping[str, float], size: int
    ) -> None:
        self._load = load
        self._boxes = boxes
        self._hyp = hyp
        self._size = size

    def __len__(self) -> int:
        return len(self._boxes)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Image uint8 [3, size, size], RGB, and class, cx, cy, w, h [n, 5]."""
        hyp = self._hyp
        image, labels = self._mosaic(index)
        if random.random() < hyp["mixup"]:
            other, other_labels = self._mosaic(random.randrange(len(self)))
            share = np.random.beta(8.0, 8.0)  # noqa: NPY002
            image = (image * share + other * (1 - share)).astype(np.uint8)
            labels = np.concatenate((labels, other_labels))
        image = recolor(image, hyp)
        labels[:, 1:] = xyxy_to_cxcywh(labels[:, 1:]) / self._size
        if random.random() < hyp["flipud"]:
            image, labels[:, 2] = np.flipud(image), 1 - labels[:, 2]
        if random.random() < hyp["fliplr"]:
            image, labels[:, 1] = np.fliplr(image), 1 - labels[:, 1]
        return np.ascontiguousarray(image[:, :, ::-1].transpose(2, 0, 1)), labels

    def _mosaic(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        canvas, labels = self._four(index) if random.random() < 0.8 else self._nine(index)
        np.clip(labels[:, 1:], 0, 2 * self._size, out=labels[:, 1:])
        return warp(canvas, labels, self._hyp, self._size)

    def _four(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        s = self._size
        y, x = (int(random.uniform(s / 2, 3 * s / 2)) for _ in range(2))
        canvas, labels = np.full((2 * s, 2 * s, 3), GREY, np.uint8), []
        for tile, number in enumerate([index, *random.choices(range(len(self)), k=3)]):
            image = self._load(number)
            h, w = image.shape[:2]
            left, top = x - w * (tile in (0, 2)), y - h * (tile in (0, 1))
            paste(image, left, top, canvas)
            labels.append(to_pixels(self._boxes[number], w, h, left, top))
        return canvas, np.concatenate(labels)

    def _nine(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        s = self._size
        canvas, labels = np.full((3 * s, 3 * s, 3), GREY, np.uint8), []
        w0 = h0 = wp = hp = 0
        for tile, number in enumerate([index, *random.choices(range(len(self)), k=8)]):
            image = self._load(number)
            h, w = image.shape[:2]
            if tile == 0:
                w0, h0 = w, h
            x = (s, s, s + wp, s + w0, s + w0, s + w0 - w, s + w0 - wp - w, s - w, s - w)[tile]
            y = (s, s - h, s - h, s, s + hp, s + h0, s + h0, s + h0 - h, s + h0 - hp - h)[tile]
            paste(image, x, y, canvas)
            labels.append(to_pixels(self._boxes[number], w, h, x, y))
            wp, hp = w, h
        top, left = (int(random.uniform(0, s)) for _ in range(2))
        moved = np.concatenate(labels)
        moved[:, 1:] -= (left, top, left, top)
        return canvas[top : top + 2 * s, left : left + 2 * s], moved


def paste(image: np.ndarray, x: int, y: int, canvas: np.ndarray) -> None:
    """Copy the part of an image at x, y that lies on the canvas."""
    height, width = canvas.shape[:2]
    x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + image.shape[1], width), min(y + image.shape[0], height)
    canvas[y1:y2, x1:x2] = image[y1 - y : y2 - y, x1 - x : x2 - x]


def to_pixels(box_n5: np.ndarray, w: int, h: int, x: int, y: int) -> np.ndarray:
    """Class and normalised cx, cy, w, h to class and corners in pixels, translated by x, y."""
    out = box_n5.copy()
    out[:, 1] = w * (box_n5[:, 1] - box_n5[:, 3] / 2) + x
    out[:, 2] = h * (box_n5[:, 2] - box_n5[:, 4] / 2) + y
    out[:, 3] = w * (box_n5[:, 1] + box_n5[:, 3] / 2) + x
    out[:, 4] = h * (box_n5[:, 2] + box_n5[:, 4] / 2) + y
    return out


def xyxy_to_cxcywh(box_n4: np.ndarray) -> np.ndarray:
    return np.concatenate(((box_n4[:, :2] + box_n4[:, 2:]) / 2, box_n4[:, 2:] - box_n4[:, :2]), 1)


def warp(canvas: np.ndarray, labels: np.ndarray, hyp: Mapping[str, float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rotate, scale and translate a canvas of twice the size, with its boxes; boxes that get too small are dropped."""
    angle = random.uniform(-hyp["degrees"], hyp["degrees"])
    scale = random.uniform(1 - hyp["scale"], 1.1 + hyp["scale"])
    move = [size * random.uniform(0.5 - hyp["translate"], 0.5 + hyp["translate"]) for _ in range(2)]
    centre, rotation, translation = np.eye(3), np.eye(3), np.eye(3)
    centre[:2, 2] = -canvas.shape[1] / 2, -canvas.shape[0] / 2
    rotation[:2] = cv2.getRotationMatrix2D((0, 0), angle, scale)
    translation[:2, 2] = move
    matrix = translation @ rotation @ centre
    image = cv2.warpAffine(canvas, matrix[:2], (size, size), borderValue=(GREY,) * 3)
    num = len(labels)
    if num:
        corners = np.ones((num * 4, 3))
        corners[:, :2] = labels[:, [1, 2, 3, 4, 1, 4, 3, 2]].reshape(-1, 2)
        corners = (corners @ matrix.T)[:, :2].reshape(num, 8)
        x, y = corners[:, [0, 2, 4, 6]], corners[:, [1, 3, 5, 7]]
        new = np.stack((x.min(1), y.min(1), x.max(1), y.max(1)), 1).clip(0, size)
        w1, h1 = labels[:, 3] * scale - labels[:, 1] * scale, labels[:, 4] * scale - labels[:, 2] * scale
        w2, h2 = new[:, 2] - new[:, 0], new[:, 3] - new[:, 1]
        aspect = np.maximum(w2 / (h2 + 1e-16), h2 / (w2 + 1e-16))
        kept = (w2 > 2) & (h2 > 2) & (w2 * h2 / (w1 * h1 + 1e-16) > 0.1) & (aspect < 20)
        labels = labels[kept]
        labels[:, 1:] = new[kept]
    return np.asarray(image), labels


def recolor(image: np.ndarray, hyp: Mapping[str, float]) -> np.ndarray:
    gain = np.random.uniform(-1, 1, 3) * (hyp["hsv_h"], hyp["hsv_s"], hyp["hsv_v"]) + 1  # noqa: NPY002
    hue, saturation, value = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
    x = np.arange(256, dtype=gain.dtype)
    tables = [((x * gain[0]) % 180), np.clip(x * gain[1], 0, 255), np.clip(x * gain[2], 0, 255)]
    planes = [cv2.LUT(p, t.astype(np.uint8)) for p, t in zip((hue, saturation, value), tables, strict=True)]
    return np.asarray(cv2.cvtColor(cv2.merge(planes), cv2.COLOR_HSV2BGR))


def collate(items: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Any, Any]:
    """Images stacked, targets with the number of their image in front; for torch's DataLoader."""
    import torch

    images = torch.stack([torch.from_numpy(image) for image, _ in items])
    targets = [
        torch.nn.functional.pad(torch.from_numpy(labels), (1, 0), value=i) for i, (_, labels) in enumerate(items)
    ]
    return images, torch.cat(targets)
