"""Polygons filled into masks by one Triton kernel. The same bits as fill_torch.py."""

from torch import Tensor

from flatout.yolo.augment import fill_kernels
from flatout.yolo.augment.fill_torch import Fills

BLOCK_ROWS = BLOCK_COLUMNS = 32


class TritonFill:
    """As `fill_torch.TorchFill`."""

    def __call__(self, fills: Fills, masks: Tensor) -> None:
        sides_K2 = fills.host_span_K7[:, 5:] - fills.host_span_K7[:, 3:5]
        blocks_K2 = sides_K2 // [BLOCK_COLUMNS, BLOCK_ROWS] + 1
        fill_kernels.fill[int(blocks_K2.prod(1).max()), len(sides_K2)](
            fills.span_K7,
            fills.point_P2,
            masks,
            *masks.shape[1:],
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            num_warps=4,
        )
