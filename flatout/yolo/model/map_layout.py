"""Maps as rows of channels, [pixels, C]: which ones our kernels can read, and how they are cut into tiles."""

import functools
import logging

import torch
from torch import Tensor

from flatout.engine.launch import HAS_TRITON

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

WORTH_IT = 1 << 23
"""Values of a map from which on our kernels are used in eager mode: below, launching them costs the host more than they
save the GPU. Chosen from two cases on an H200 (bench/results/model_step_h200_202611.md), not from a sweep."""

WORTH_IT_COMPILED = 1 << 25
"""The same under torch.compile, whose own kernels cost the host less than ours and pass over a map no more often, but
more slowly: estimated from yolov7 at 640 px, 28 ms over 6.5e9 values, against some 100 us of the host per layer."""


def suits_kernels(x: Tensor) -> bool:
    """Is it a channels_last map on a GPU, of a type the kernels know, and are they the faster way?"""
    if not x.is_cuda or x.dtype not in DTYPES or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if torch.compiler.is_compiling():
        return HAS_TRITON and x.numel() >= WORTH_IT_COMPILED
    if not HAS_TRITON:
        say_what_is_missing()
        return False
    return (x.numel() >= WORTH_IT or _is_captured()) and x.get_device() == torch.cuda.current_device()


@functools.cache
def say_what_is_missing() -> None:
    """Once, to people with a GPU and no Triton."""
    logger.warning(
        "Triton is not installed: batch norms, activations and pooling go through torch, and a training step takes "
        "about 1.5 times as long. `pip install triton` mends it."
    )


def _is_captured() -> bool:
    """Is this being recorded as a CUDA graph? Its replay does not launch from Python."""
    return torch.cuda.is_current_stream_capturing()


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
