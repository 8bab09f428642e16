"""Maps as rows of channels, [pixels, C]: which ones our kernels can read, and how they are cut into tiles."""

import functools
import logging

import torch
from torch import Tensor

from flatout.engine.launch import HAS_TRITON

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def suits_kernels(x: Tensor) -> bool:
    """Is it a channels_last map on a GPU, of a type the kernels know?

    Then they are the faster way. For small maps too: they cost the host less than torch's
    (bench/results/model_step_ideas_h200_202611.md).
    """
    if not x.is_cuda or x.dtype not in DTYPES or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if torch.compiler.is_compiling():
        return HAS_TRITON
    if not HAS_TRITON:
        say_what_is_missing()
        return False
    return x.get_device() == torch.cuda.current_device()


@functools.cache
def say_what_is_missing() -> None:
    """Once, to people with a GPU and no Triton."""
    logger.warning(
        "Triton is not installed: batch norms, activations and pooling go through torch, and a training step takes "
        "about 1.5 times as long. `pip install triton` mends it."
    )


def row_stride(x: Tensor) -> tuple[Tensor, int]:
    """A map whose pixels lie at equal distances, and that distance: `x` itself also if it is a slice of a wider
    channels_last map, as gradients of a concatenation are; else a copy."""
    batch, channels, height, width = x.stride()
    pixels = x.shape[2] * x.shape[3]
    if channels == 1 and width >= x.shape[1] and height == width * x.shape[3] and batch == width * pixels:
        return x, width
    return x.contiguous(memory_format=torch.channels_last), x.shape[1]


def columns_of(channels: int) -> int:
    """Channels of a tile."""
    return min(max(1 << (channels - 1).bit_length(), 16), 128)


def pieces(total: int, size: int) -> int:
    """How many pieces of a size cover the total."""
    return -(-total // size)
