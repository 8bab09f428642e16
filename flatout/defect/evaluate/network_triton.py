"""Kernels of the rewritten network (network.py), for channels_last maps: each value is read and written once.

Integers are not specialised, so that a network needs few kernels; a number of values is a number of pixels times a
constant, by which Triton sees that masks end between wide loads. Values are numbered with 32 bits.

Dimension key:  B images   C channels   H W map
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels import start

BLOCK = 1024
"""Values per program."""


@triton.jit(do_not_specialize=["pixels"])
def bias_relu(values, bias, pixels, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Add a bias per channel and apply ReLU, in place."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels * CHANNELS
    value = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.maximum(value + tl.load(bias + at % CHANNELS), 0.0)
    tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pixels", "width"])
def pool_2x2(values, out, pixels, width, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest of 2 x 2 pixels; `pixels` and `width` are those of `out`. Rows of all images are numbered on, because
    heights are even."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels * CHANNELS
    channel, pixel = at % CHANNELS, at // CHANNELS
    row, column = pixel // width, pixel % width
    first = values + (row * (4 * width) + 2 * column) * CHANNELS + channel
    below = first + 2 * width * CHANNELS
    upper = tl.maximum(tl.load(first, mask=inside), tl.load(first + CHANNELS, mask=inside))
    lower = tl.maximum(tl.load(below, mask=inside), tl.load(below + CHANNELS, mask=inside))
    tl.store(out + at, tl.maximum(upper, lower), mask=inside)


@triton.jit(do_not_specialize=["pixels", "height", "width"])
def upsample_2x(values, out, pixels, height, width, scale_y, scale_x, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Bilinear; `pixels` are those of `out`, `height` and `width` those of `values`. A block is of whole pixels, whose
    values are read together."""
    pixel = tl.program_id(0) * (BLOCK // CHANNELS) + tl.arange(0, BLOCK // CHANNELS)
    row, column = pixel // (2 * width), pixel % (2 * width)
    image, y = row // (2 * height), (row % (2 * height)).to(tl.float32) * scale_y
    x = column.to(tl.float32) * scale_x
    top, left = y.to(tl.int32), x.to(tl.int32)
    part_y, part_x = (y - top)[:, None], (x - left)[:, None]
    bottom, right = tl.minimum(top + 1, height - 1), tl.minimum(left + 1, width - 1)
    upper, lower = (image * height + top) * width, (image * height + bottom) * width
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = (pixel < pixels)[:, None]
    top_left = tl.load(values + (upper + left)[:, None] * CHANNELS + channel, mask=inside).to(tl.float32)
    top_right = tl.load(values + (upper + right)[:, None] * CHANNELS + channel, mask=inside).to(tl.float32)
    low_left = tl.load(values + (lower + left)[:, None] * CHANNELS + channel, mask=inside).to(tl.float32)
    low_right = tl.load(values + (lower + right)[:, None] * CHANNELS + channel, mask=inside).to(tl.float32)
    above = top_left * (1 - part_x) + top_right * part_x
    under = low_left * (1 - part_x) + low_right * part_x
    value = above * (1 - part_y) + under * part_y
    tl.store(out + pixel[:, None] * CHANNELS + channel, value.to(out.dtype.element_ty), mask=inside)


def add_bias_relu_(x_BCHW: Tensor, bias_C: Tensor) -> Tensor:
    """ReLU of x + bias, in place."""
    _start(bias_relu, x_BCHW, x_BCHW, bias_C)
    return x_BCHW


def max_pool(x_BCHW: Tensor) -> Tensor:
    """As F.max_pool2d(x, 2), for even sizes."""
    height, width = x_BCHW.shape[2:]
    out = _empty(x_BCHW, height // 2, width // 2)
    _start(pool_2x2, out, x_BCHW, out, rest=(width // 2,))
    return out


def upsample(x_BCHW: Tensor) -> Tensor:
    """As F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), for a power of two of channels."""
    height, width = x_BCHW.shape[2:]
    out = _empty(x_BCHW, 2 * height, 2 * width)
    scales = ((height - 1) / (2 * height - 1), (width - 1) / (2 * width - 1))
    _start(upsample_2x, out, x_BCHW, out, rest=(height, width, *scales))
    return out


def _start(kernel: Any, written_BCHW: Tensor, *maps: Tensor, rest: tuple[float, ...] = ()) -> None:
    """Start a kernel(*maps, pixels, *rest) over the values that it writes."""
    num, channels = written_BCHW.numel(), written_BCHW.shape[1]
    start(kernel, triton.cdiv(num, BLOCK), *maps, num // channels, *rest, CHANNELS=channels, BLOCK=BLOCK)


def _empty(like_BCHW: Tensor, height: int, width: int) -> Tensor:
    """An uninitialised channels_last map of the same images and channels."""
    shape = (*like_BCHW.shape[:2], height, width)
    return torch.empty(shape, dtype=like_BCHW.dtype, device=like_BCHW.device, memory_format=torch.channels_last)
