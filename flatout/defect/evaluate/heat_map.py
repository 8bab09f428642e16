"""A whole image through the network: its patches as one batch, stitched so that every pixel has one owner.

Dimension key:  C planes   H W image   T tiles   P patch side
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.defect.model import GRID
from flatout.defect.patches import Grid
from flatout.defect.strips.canonical import TOP

TILES_AT_ONCE = 64
"""More at a time gain nothing, and a large image would not fit."""


class HeatMapper:
    """Probability of a defect at every pixel of images of one size."""

    def __init__(
        self,
        network: nn.Module,
        grid: Grid,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        untiled: bool = False,
    ) -> None:
        """`network` in evaluation mode on `device`; `dtype` it computes in. `untiled`: one pass over the image."""
        self._network, self._device, self._dtype, self._untiled = network, device, dtype, untiled
        self._shape_hw = grid.shape_hw
        row_TP = (torch.tensor(grid.ys)[:, None] + torch.arange(grid.patch_hw[0])).to(device)
        column_TP = (torch.tensor(grid.xs)[:, None] + torch.arange(grid.patch_hw[1])).to(device)
        place = row_TP[:, None, :, None] * grid.shape_hw[1] + column_TP[None, :, None, :]
        self._tile_pixels_TPP = place.reshape(grid.per_image, *grid.patch_hw)
        self._owner_HW = torch.from_numpy(grid.owners()).to(device)

    @torch.inference_mode()
    def __call__(self, planes_CHW: np.ndarray) -> np.ndarray:
        """float32 [H, W] of an image in 0..255; waits for the device."""
        image_CHW = torch.from_numpy(np.array(planes_CHW, np.float32)).to(self._device) / TOP
        probability_HW = self._whole(image_CHW) if self._untiled else self._stitched(image_CHW)
        return np.asarray(probability_HW.cpu().numpy())

    def _stitched(self, image_CHW: Tensor) -> Tensor:
        tiles = image_CHW.flatten(1)[:, self._tile_pixels_TPP].transpose(0, 1)
        parts = [self._probability(part) for part in tiles.split(TILES_AT_ONCE)]
        return torch.cat(parts).reshape(-1)[self._owner_HW]

    def _whole(self, image_CHW: Tensor) -> Tensor:
        height, width = self._shape_hw
        padding = (0, -width % GRID, 0, -height % GRID)
        padded = F.pad(image_CHW[None], padding, mode="replicate")
        return self._probability(padded)[0, :height, :width]

    def _probability(self, x: Tensor) -> Tensor:
        """[B, H, W], float32."""
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self._network(x.contiguous(memory_format=torch.channels_last))
        return torch.softmax(logits.float(), 1)[:, 1]
