"""A batch of patches, cropped and painted by one Triton kernel where the images are.

The same bits as render_torch.py, whose some two hundred small operations keep a host busy for longer than a GPU needs
for a whole training step (bench/defect_step.py). Lines and disturbances come first, by torch, where a recipe has them.

Dimension key:  B samples   C planes   P patch side
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.defect import render_kernels
from flatout.defect.data.items import MIDDLE, PLANES
from flatout.defect.patches import Grid
from flatout.defect.render import PatchRenderer
from flatout.defect.synth.config import SynthConfig
from flatout.defect.synth.draw import DEFECTS
from flatout.defect.synth.kernels import Kernels
from flatout.defect.synth.paint import VISIBLE
from flatout.feed import Sources
from flatout.kernels import is_aligned, launch

BLOCK_ROWS, BLOCK_COLUMNS = 8, 64
NUM_WARPS = 4


class Crops(NamedTuple):
    """Where the patches of a batch lie: whole images or patches, one plane after the other."""

    data: Tensor
    begin_B: Tensor
    corner_B2: Tensor
    width: int
    plane_size: int


class TritonRenderer(PatchRenderer):
    """As its parent."""

    def __init__(self, grid: Grid, config: SynthConfig, kernels: Kernels, device: torch.device) -> None:
        super().__init__(grid, config, kernels, device)
        self._side = 2 * kernels.reach + 1
        self._zeros = torch.zeros(0, 2, dtype=torch.int32, device=device)

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        crops = self._crops(sources, params)
        images, masks = out["images"], out["masks"]
        num, _, height, width = images.shape
        places = params["kernel"].shape[1]
        across, down = -(-width // BLOCK_COLUMNS), -(-height // BLOCK_ROWS)
        self._launch(
            (across * down, num, 1),
            crops.data,
            crops.begin_B,
            crops.corner_B2,
            params["kind"],
            params["num"],
            params["center"],
            params["kernel"],
            params["amplitude"],
            params["labelled"].view(torch.uint8),
            self._value_QSS,
            self._label_QSS.view(torch.uint8),
            images,
            masks,
            crops.width,
            crops.plane_size,
            *images.stride(),
            height,
            width,
            across,
            DEFECTS,
            VISIBLE,
            MIDDLE,
            places,
            1 << (places - 1).bit_length(),
            self._side,
            self._config.reads_pixels,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
        )

    def _launch(self, grid: tuple[int, int, int], *args: Any) -> None:
        key = tuple((each.dtype, is_aligned(each)) if isinstance(each, Tensor) else each for each in args)
        # Products are rounded before they are added, as on the CPU: no fusion.
        launch(render_kernels.crop_and_paint, key, grid, *args, num_warps=NUM_WARPS, enable_fp_fusion=False)

    def _crops(self, sources: Sources, params: Mapping[str, Tensor]) -> Crops:
        if not self._config.disturbs and not self._config.line_ratio:
            begin_B = sources.offsets.reshape(-1)
            return Crops(sources.data, begin_B, params["corner"], self._width, self._height * self._width)
        patch_BCPP = self._background(sources, params)
        height, width = self._patch_hw
        begin_B = torch.arange(len(patch_BCPP), device=patch_BCPP.device) * (PLANES * height * width)
        if len(self._zeros) < len(patch_BCPP):
            self._zeros = params["corner"].new_zeros(len(patch_BCPP), 2)
        return Crops(patch_BCPP.contiguous(), begin_B, self._zeros, width, height * width)
