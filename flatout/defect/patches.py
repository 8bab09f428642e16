"""The grid of patches of a run: tiles of one size over images of one size (flatout/images/tiles.py).

    sample number -> image, row, column -> y, x          tiles --owner--> image: every pixel from exactly one patch

Dimension key:  M samples
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flatout.errors import ConfigError
from flatout.images import TileGrid, tiles_for_overlap

MIN_OVERLAP = 16
"""Pixels that neighbouring patches share by default: results are better away from the edge of a patch."""


@dataclass(frozen=True)
class Grid(TileGrid):
    """The patch grid of a run, the same for every image because all images have one size."""

    @classmethod
    def over(cls, shape_hw: tuple[int, int], patch: int, min_patches: tuple[int, int] | None = None) -> "Grid":
        """Square patches; without `min_patches` (rows, columns), enough that neighbours share MIN_OVERLAP pixels."""
        wanted = min_patches or tuple(tiles_for_overlap(side, patch, MIN_OVERLAP) for side in shape_hw)
        return cls(shape_hw, (patch, patch), (wanted[0], wanted[1]))

    def __post_init__(self) -> None:
        if any(side < patch for side, patch in zip(self.shape_hw, self.tile_hw, strict=True)):
            height, width = self.shape_hw
            raise ConfigError(
                f"images of {width} x {height} px (width x height) are smaller than the patch of {self.tile_hw[0]} px: "
                "use a smaller --patch_size."
            )

    @property
    def patch_hw(self) -> tuple[int, int]:
        return self.tile_hw

    def locate(self, samples_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Image number, y and x of the patch of each sample, int64 [M] each."""
        image_M, tile_M = np.divmod(np.asarray(samples_M, np.int64), self.per_image)
        row_M, column_M = np.divmod(tile_M, len(self.xs))
        return image_M, np.asarray(self.ys)[row_M], np.asarray(self.xs)[column_M]


GridOver = Callable[[tuple[int, int]], Grid]
"""Size of an image (height, width) -> its patch grid."""
