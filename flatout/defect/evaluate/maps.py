"""Heat maps: the patches of an image as one batch, stitched so that every pixel comes from exactly one patch.

Dimension key:  C planes   H W image   T tiles   P patch side   B tiles at a time
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.defect.data.items import MAX_GREY
from flatout.defect.model import GRID
from flatout.defect.patches import GridOver

MakeMap = Callable[[np.ndarray], np.ndarray]
"""Planes [C, H, W] -> heat map [H, W]."""

TILES_AT_ONCE = 64
"""Tiles per forward pass: more are not faster, and those of a large image might not fit into memory."""


class _Tiling(NamedTuple):
    """How images of one size are cut into tiles and put together again; on the device."""

    pixel_TPP: Tensor
    """Number of each pixel of each tile in the image, int64."""
    owner_HW: Tensor
    """For each pixel of the image, the number of the pixel of the tiles that it is taken from."""


class HeatMapper:
    """Computes the probability of a defect at every pixel. Images may have different sizes."""

    def __init__(
        self,
        network: nn.Module,
        grid_over: GridOver,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        untiled: bool = False,
    ) -> None:
        """`network` is on `device` in evaluation mode and computes in `dtype`. `untiled`: one pass over the image."""
        self._network, self._device, self._dtype, self._untiled = network, device, dtype, untiled
        self._grid_over = grid_over
        self._tilings: dict[tuple[int, int], _Tiling] = {}

    @torch.inference_mode()
    def __call__(self, planes_CHW: np.ndarray) -> np.ndarray:
        """Heat map, float32 [H, W], of planes in 0..255. Waits for the device."""
        image_CHW = torch.from_numpy(np.array(planes_CHW, np.float32)).to(self._device) / MAX_GREY
        probability_HW = self._whole(image_CHW) if self._untiled else self._stitched(image_CHW)
        return np.asarray(probability_HW.cpu().numpy())

    def _stitched(self, image_CHW: Tensor) -> Tensor:
        tiling = self._tiling((image_CHW.shape[1], image_CHW.shape[2]))
        tiles = image_CHW.flatten(1)[:, tiling.pixel_TPP].transpose(0, 1)
        parts = [self._probability(part) for part in tiles.split(TILES_AT_ONCE)]
        return torch.cat(parts).reshape(-1)[tiling.owner_HW]

    def _tiling(self, shape_hw: tuple[int, int]) -> _Tiling:
        if shape_hw not in self._tilings:
            grid = self._grid_over(shape_hw)
            row_TP = torch.tensor(grid.ys)[:, None] + torch.arange(grid.patch_hw[0])
            column_TP = torch.tensor(grid.xs)[:, None] + torch.arange(grid.patch_hw[1])
            pixel = row_TP[:, None, :, None] * shape_hw[1] + column_TP[None, :, None, :]
            pixel_TPP = pixel.reshape(grid.per_image, *grid.patch_hw).to(self._device)
            self._tilings[shape_hw] = _Tiling(pixel_TPP, torch.from_numpy(grid.owners()).to(self._device))
        return self._tilings[shape_hw]

    def _whole(self, image_CHW: Tensor) -> Tensor:
        height, width = image_CHW.shape[1:]
        padding = (0, -width % GRID, 0, -height % GRID)
        padded = F.pad(image_CHW[None], padding, mode="replicate")
        return self._probability(padded)[0, :height, :width]

    def _probability(self, x: Tensor) -> Tensor:
        """Probability of a defect, float32 [B, H, W]."""
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self._network(x.contiguous(memory_format=torch.channels_last))
        return torch.softmax(logits.float(), 1)[:, 1]
