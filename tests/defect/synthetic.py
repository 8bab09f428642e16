"""Small images and recipes for tests: the texture of the benchmark, in any size."""

from typing import Any

import numpy as np

from flatout.defect.patches import Grid
from flatout.defect.source import SampleRecipe
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.pool import Kernels, amplitudes_of, make_kernels


def texture(number: int, shape_hw: tuple[int, int]) -> np.ndarray:
    """Three noisy planes with one sine texture, float32 [3, H, W]."""
    rng = np.random.RandomState(20250803 + number)
    phase_x, phase_y = rng.uniform(0, 2 * np.pi, 2)
    y, x = np.meshgrid(*map(np.arange, shape_hw), indexing="ij")
    base = 120 + 55 * np.sin(2 * np.pi * x / 16 + phase_x) * np.sin(2 * np.pi * y / 24 + phase_y)
    return np.stack([np.clip(base + rng.normal(0, 3, shape_hw), 0, 255) for _ in range(3)]).astype(np.float32)


class Textures:
    """Read-only texture images in memory, as a source of samples reads them."""

    def __init__(self, num: int, shape_hw: tuple[int, int] = (96, 80)) -> None:
        self.images = [texture(number, shape_hw) for number in range(num)]
        for image in self.images:
            image.flags.writeable = False

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.images[index]

    def where(self, index: int) -> str:
        return f"texture {index}"


def recipe_for(images: Textures, *, patch: int = 48, hard: int = 0, **settings: Any) -> SampleRecipe:
    config = SynthConfig(**settings)
    kernels = Kernels.standard()
    if config.mode != "gaussian":
        kernels = make_kernels(config.mode, psf_type="type1", pool_size=4, seed=0)
        config = SynthConfig(**settings, amplitudes=amplitudes_of(config.mode, "type1", config.amplitudes))
    grid = Grid.over(images[0].shape[1:], patch)
    return SampleRecipe(grid, config, kernels, num_images=len(images) - hard, num_hard_negatives=hard)
