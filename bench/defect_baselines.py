"""The two designs that the input of the defect job is compared with, implemented as they were described in 2025.

A, July: everything on the full image, full-frame Gaussians, no cache.
B, August: crop first, Gaussians in local boxes, decoded images cached.

Dimension key:  H W image   C planes   P patch side
"""

from pathlib import Path

import numpy as np
import tifffile

from flatout.images import tile_starts

PATCH = 128
AMPLITUDES = (-80, -60, 60, 80)
Sample = tuple[np.ndarray, np.ndarray]
"""Planes [3, P, P] and mask [1, P, P], float32, planes in 0..1."""


class July:
    """Baseline A: a list of dicts as index; reads whole files and paints whole planes."""

    KERNELS = (((3, 3), (1.0, 1.0)), ((3, 5), (1.0, 1.5)))

    def __init__(self, paths: list[Path], shape_hw: tuple[int, int]) -> None:
        self.shape_hw = shape_hw
        ys, xs = (tile_starts(side, PATCH, 2) or [] for side in shape_hw)
        self.index = [
            {"image": number, "path": str(path), "y": y, "x": x}
            for number, path in enumerate(paths)
            for y in ys
            for x in xs
        ]

    def __call__(self, index: int, rng: np.random.RandomState) -> Sample:
        entry = self.index[index]
        image_HWC = tifffile.imread(str(entry["path"])).transpose(1, 2, 0)
        target, ref1, ref2 = (image_HWC[:, :, plane].copy() for plane in range(3))
        num = rng.randint(5, 15)
        defects = [self._defect(rng) for _ in range(num)]
        amplitudes = [rng.choice(AMPLITUDES) for _ in range(num)]
        out1, out2 = self._removed(num, rng)
        for number, ((frame, _), amplitude) in enumerate(zip(defects, amplitudes, strict=True)):
            target = np.clip(target + frame * amplitude, 0, 255)
            if number not in out1:
                ref1 = np.clip(ref1 + frame * amplitude, 0, 255)
            if number not in out2:
                ref2 = np.clip(ref2 + frame * amplitude, 0, 255)
        mask = np.zeros(self.shape_hw, np.float32)
        for number in out1 & out2:
            mask = np.maximum(mask, defects[number][1])
        y, x = int(entry["y"]), int(entry["x"])  # type: ignore[call-overload]
        cut = (slice(y, y + PATCH), slice(x, x + PATCH))
        planes = np.stack([plane[cut] for plane in (target, ref1, ref2)]).astype(np.float32) / 255
        return planes, mask[cut][None]

    def _defect(self, rng: np.random.RandomState) -> Sample:
        height, width = self.shape_hw
        cx, cy = rng.randint(5, width - 5), rng.randint(5, height - 5)
        (h, w), (sigma_x, sigma_y) = self.KERNELS[rng.rand() <= 0.5]
        x, y = np.meshgrid(np.arange(width), np.arange(height))
        frame = np.exp(-((x - cx) ** 2 / (2 * sigma_x**2) + (y - cy) ** 2 / (2 * sigma_y**2)))
        box = (np.abs(x - cx) <= w // 2) & (np.abs(y - cy) <= h // 2)
        frame = frame * box
        frame = frame / frame.max()
        return frame, (frame > 0.1).astype(np.float32)

    @staticmethod
    def _removed(num: int, rng: np.random.RandomState) -> tuple[set[int], set[int]]:
        most = max(1, num - 2)
        out1, out2 = (set(rng.choice(num, rng.randint(1, most + 1), replace=False).tolist()) for _ in range(2))
        if num >= 3 and rng.rand() < 0.8:
            out2 |= set(rng.choice(sorted(out1), min(2, len(out1)), replace=False).tolist())
        return out1, out2


class August:
    """Baseline B with every image cached: decoded once, patches cropped first, the whole patch copied per defect."""

    KERNELS = (((3, 3), (1.3, 1.3)), ((3, 5), (1.0, 1.5)))

    def __init__(self, images: list[np.ndarray], shape_hw: tuple[int, int]) -> None:
        """`images` [H, W, 3] float32, as the cache holds them."""
        self._images = images
        self._ys, self._xs = tile_starts(shape_hw[0], PATCH, 9) or [], tile_starts(shape_hw[1], PATCH, 2) or []

    def __len__(self) -> int:
        return len(self._images) * len(self._ys) * len(self._xs)

    def __call__(self, index: int, rng: np.random.RandomState) -> Sample:
        image, rest = divmod(index, len(self._ys) * len(self._xs))
        y, x = self._ys[rest // len(self._xs)], self._xs[rest % len(self._xs)]
        patch = self._images[image][y : y + PATCH, x : x + PATCH]
        target, ref1, ref2 = (patch[:, :, plane].copy() for plane in range(3))
        mask = np.zeros((PATCH, PATCH), np.float32)
        if rng.rand() < 0.5:
            num = rng.randint(3, 9)
            order = rng.permutation(num)
            alone = rng.randint(1, min(2, num // 2) + 1)
            third = (num - alone) // 3
            in_ref1 = {*order[alone : alone + third].tolist(), *order[alone + 2 * third :].tolist()}
            in_ref2 = {*order[alone + third :].tolist()}
            for number in range(num):
                frame, box = self._defect(rng)
                amplitude = rng.choice(AMPLITUDES)
                target = self._applied(target, frame, box, amplitude)
                if number in in_ref1:
                    ref1 = self._applied(ref1, frame, box, amplitude)
                if number in in_ref2:
                    ref2 = self._applied(ref2, frame, box, amplitude)
                if number in order[:alone]:
                    mask[box] = np.maximum(mask[box], (frame > 0.1).astype(np.float32))
        return np.stack((target, ref1, ref2)).astype(np.float32) / 255, mask[None]

    def _defect(self, rng: np.random.RandomState) -> tuple[np.ndarray, tuple[slice, slice]]:
        cx, cy = rng.randint(5, PATCH - 5), rng.randint(5, PATCH - 5)
        (h, w), (sigma_x, sigma_y) = self.KERNELS[rng.rand() <= 0.5]
        top, bottom = max(cy - 3 * h, 0), min(cy + 3 * h, PATCH)
        left, right = max(cx - 3 * w, 0), min(cx + 3 * w, PATCH)
        x, y = np.meshgrid(np.arange(left, right), np.arange(top, bottom))
        frame = np.exp(-((x - cx) ** 2 / (2 * sigma_x**2) + (y - cy) ** 2 / (2 * sigma_y**2)))
        frame = frame * ((np.abs(x - cx) <= w // 2) & (np.abs(y - cy) <= h // 2))
        return frame / frame.max(), (slice(top, bottom), slice(left, right))

    @staticmethod
    def _applied(plane: np.ndarray, frame: np.ndarray, box: tuple[slice, slice], amplitude: float) -> np.ndarray:
        painted = plane.copy()
        painted[box] += (frame * amplitude).astype(np.float32)
        return np.clip(painted, 0, 255)
