"""Generates a demo data set: strips with a sine texture in three noisy planes, with painted defects in test images.

The same number gives the same strip on every machine; benchmarks use these strips too.

Dimension key:  C planes   H W pixels   K defects   G groups of defects
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.defect.data.find import DEFECTIVE, GOOD
from flatout.defect.data.items import MAX_GREY
from flatout.defect.synth.draw import IN_PLANE_GC, R1, R2, B, T
from flatout.defect.synth.paint import paint
from flatout.defect.synth.pool import Kernels
from flatout.demo_folder import draw_set
from flatout.errors import ConfigError

STRIP_HW = (976, 176)
FIRST_SEED = 20250803
FIRST_DEFECTIVE = 10_000
"""Strips from this number on are used for validation and test."""
_GROUPS = (T, T, T, T, R1, R1, R2, R2, B, B)
"""Groups of the defects of a defective strip."""
_MARGIN = 5
"""Minimum distance of a defect's centre from the edge, in pixels."""
VERSION = 1
"""Version of the generator: raised when the same numbers give other strips."""
GENERATED_FILES = re.compile(r"(train|valid|test|ground_truth|ground_truth_valid)/\w+/\d+(_mask)?\.tiff")
"""Files of a demo set, relative to its folder."""


@dataclass(frozen=True, kw_only=True)
class DemoDataConfig:
    """The size of a demo set."""

    images: int = 24
    """Strips for training."""
    valid: int = 4
    """Good strips for validation, and as many defective ones."""
    test: int = 4
    """Good strips for testing, and as many defective ones."""
    shape_hw: tuple[int, int] = STRIP_HW

    def __post_init__(self) -> None:
        if min(self.images, self.valid, self.test) < 1 or min(self.shape_hw) < 32:
            raise ConfigError("A demo set needs at least one image of each kind, at least 32 pixels high and wide.")


def generate_strip(number: int, shape_hw: tuple[int, int] = STRIP_HW) -> np.ndarray:
    """A defect-free strip, float32 [C, H, W] in 0..255."""
    rng = np.random.RandomState(FIRST_SEED + number)
    phase_x, phase_y = rng.uniform(0, 2 * np.pi, 2)
    y_H, x_W = np.arange(shape_hw[0])[:, None], np.arange(shape_hw[1])
    base = 120 + 55 * np.sin(2 * np.pi * x_W / 16 + phase_x) * np.sin(2 * np.pi * y_H / 24 + phase_y)
    return np.stack([np.clip(base + rng.normal(0, 3, shape_hw), 0, MAX_GREY) for _ in range(3)]).astype(np.float32)


def generate_defective_strip(number: int, shape_hw: tuple[int, int] = STRIP_HW) -> tuple[np.ndarray, np.ndarray]:
    """A strip with four defects in target alone and six that are also in references; and its mask, bool [H, W]."""
    planes_CHW, mask_HW = generate_strip(FIRST_DEFECTIVE + number, shape_hw), np.zeros(shape_hw, np.bool_)
    rng = np.random.default_rng((FIRST_SEED, FIRST_DEFECTIVE + number))
    group_K = np.array(_GROUPS)
    height, width = shape_hw
    amplitude_K1 = rng.choice([-80, -60, 60, 80], len(group_K)).astype(np.float32)[:, None]
    sample = {
        "num": np.array(len(group_K)),
        "center": rng.integers(_MARGIN, [width - _MARGIN, height - _MARGIN], (len(group_K), 2)),
        "kernel": rng.integers(0, 2, len(group_K)),
        "amplitude": amplitude_K1 * IN_PLANE_GC[group_K],
        "labelled": group_K == T,
    }
    paint(planes_CHW, mask_HW, sample, Kernels.standard(), full_swing=False)
    return planes_CHW, mask_HW


def write_demo_data(root: Path, config: DemoDataConfig) -> Path:
    """Generate a data set below `root`, unless the same one exists there; returns R/train/good."""
    note = {"job": "defect", "version": VERSION, **asdict(config)}
    draw_set(root, note, GENERATED_FILES, lambda: _write_all(root, config))
    return root / "train" / GOOD


def _write_all(root: Path, config: DemoDataConfig) -> None:
    for number in range(config.images):
        write_strip(root / "train" / GOOD / f"{number:04}.tiff", generate_strip(number, config.shape_hw))
    first = 0
    for split, truth, count in (("valid", "ground_truth_valid", config.valid), ("test", "ground_truth", config.test)):
        for number in range(first, first + count):
            good = generate_strip(2 * FIRST_DEFECTIVE + number, config.shape_hw)
            write_strip(root / split / GOOD / f"{number:04}.tiff", good)
            planes_CHW, mask_HW = generate_defective_strip(number, config.shape_hw)
            write_strip(root / split / DEFECTIVE / f"{number:04}.tiff", planes_CHW)
            write_tiff(root / truth / DEFECTIVE / f"{number:04}_mask.tiff", mask_HW.astype(np.uint8) * 255)
        first += count


def write_strip(path: Path, planes_CHW: np.ndarray) -> None:
    """Write planes as an uncompressed TIFF."""
    write_tiff(path, planes_CHW, photometric="minisblack", planarconfig="separate")


def write_tiff(path: Path, array: np.ndarray, **layout: Any) -> None:
    import tifffile

    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, array, **layout)
