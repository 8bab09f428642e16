"""Pictures of a batch from parameters by one Triton kernel, straight into the network's input.

The same bits as render_torch.py; how fast: bench/augment_gpu.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from flatout.yolo.augment import render_kernels
from flatout.yolo.augment.hsv_torch import color_tables, reciprocals
from flatout.yolo.augment.render_torch import Sources

BLOCK_ROWS, BLOCK_COLUMNS = 8, 32
"""Output pixels of a program: a block that is square in the picture shares most of the pixels it reads."""
NUM_WARPS = 4


class TritonRender:
    """As `render_torch.TorchRender`: fills out["images"], [B, 3, H, W] RGB, of any dtype and memory format."""

    def __init__(self, *, perspective: bool = False, recolor: bool = True, subsampled: bool = False) -> None:
        self._perspective = perspective
        self._recolor = recolor
        self._subsampled = subsampled
        self._reciprocals: Tensor | None = None

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        images = out["images"]
        num, _, height, width = images.shape
        if self._reciprocals is None:
            self._reciprocals = torch.stack([reciprocals(scale, images.device) for scale in (255, 180 / 6)])
        across, down = -(-width // BLOCK_COLUMNS), -(-height // BLOCK_ROWS)
        render_kernels.render[across * down, num](
            sources.data,
            sources.offsets,
            sources.shapes,
            params["tiles"],
            params["canvas"],
            params["num_tiles"],
            params["inverse"],
            params["mix"],
            params["flip"],
            self._reciprocals,
            color_tables(params["gain"]) if self._recolor else self._reciprocals,
            # Any memory where nothing is copied: it is not looked at.
            params.get("masks", sources.data),
            params.get("mask_of", params["num_tiles"]),
            images,
            *images.stride(),
            height,
            width,
            across,
            self._perspective,
            "masks" in params,
            self._subsampled,
            self._recolor,
            images.is_floating_point(),
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
            # Sums of products are rounded twice, as on the CPU.
            enable_fp_fusion=False,
        )
