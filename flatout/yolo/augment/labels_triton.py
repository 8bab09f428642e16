"""Open labels made targets by one Triton kernel. The same bits as labels_torch.py; how fast: bench/augment_gpu.py."""

from collections.abc import Mapping

import torch
from torch import Tensor

from flatout.yolo.augment import label_kernels
from flatout.yolo.augment.labels_torch import DeviceLabels

POINTS_OF_PROGRAM = 1024
"""The least power of two that has room for the points along a polygon."""
NUM_WARPS = 8


class TritonLabels:
    """As `labels_torch.TorchLabels`."""

    def __init__(self, labels: DeviceLabels, *, perspective: bool) -> None:
        self._labels = labels
        self._perspective = perspective

    def __str__(self) -> str:
        return "one kernel"

    def __call__(self, row_T6: Tensor, params: Mapping[str, Tensor], out_wh: tuple[int, int], count: Tensor) -> Tensor:
        target_T6 = row_T6.view(torch.float32)
        if not len(row_T6):
            return target_T6
        label_kernels.finish[(len(row_T6),)](
            row_T6,
            target_T6,
            count,
            *self._labels,
            params["label_tiles"],
            params["num_tiles"],
            params["canvas"],
            params["matrix"],
            params["scale"],
            params["by_polygons"],
            params["flip"],
            *out_wh,
            self._perspective,
            POINTS_OF_PROGRAM,
            num_warps=NUM_WARPS,
            # Sums of products are rounded twice, as on the CPU.
            enable_fp_fusion=False,
        )
        return target_T6
