"""Objects pasted over finished pictures by one Triton kernel. The same bits as paste_torch.py."""

from torch import Tensor

from flatout.yolo.augment import paste_kernels
from flatout.yolo.augment.paste_torch import Pasting

BLOCK_ROWS = BLOCK_COLUMNS = 16
"""Pixels of a program: small, as most objects are."""


class TritonPaste:
    """As `paste_torch.TorchPaste`."""

    def __call__(self, pasting: Pasting, images: Tensor) -> None:
        _, _, height, width = images.shape
        across, down = -(-width // BLOCK_COLUMNS), -(-height // BLOCK_ROWS)
        paste_kernels.paste[across * down, len(pasting.host_spans_S4)](
            pasting.sources.data,
            pasting.sources.offsets,
            pasting.sources.shapes,
            pasting.object_KC,
            pasting.point_P2,
            pasting.spans_S4,
            pasting.flip_B2,
            images,
            *images.stride(),
            height,
            width,
            across,
            pasting.subsampled,
            images.is_floating_point(),
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            num_warps=4,
        )
