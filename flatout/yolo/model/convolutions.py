"""Convolutions for which cuDNN has no fast kernels, by our own kernels on a GPU and by torch everywhere else.

    convolve    the first convolution of a network, on three colours
    predict     1 x 1 with a bias, for a number of output channels that is no multiple of 8

cuDNN takes seven to nine times as long for them as reading and writing their maps would.

Under autocast to half precision only, on channels_last maps, in training. Everything else goes through torch, with the
same result but for rounding. Entry points for eager mode and for torch.compile are as in fused.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.kernels import is_aligned, launch
from flatout.yolo.model import fused
from flatout.yolo.model.fused import (
    ceil_div,
    empty_map,
    norm_act,
    norm_act_arguments,
    suits_norm_act,
    tile_channels,
)

HALVES = (torch.bfloat16, torch.float16)


def convolve(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """conv(x)."""
    dtype = _half_of_autocast(x) if _is_stem(conv) and not x.requires_grad else None
    if dtype is None:
        y: Tensor = conv(x)
        return y
    apply = torch.ops.flatout.stem if torch.compiler.is_compiling() else _Stem.apply
    z: Tensor = apply(x.to(dtype), conv.weight.to(dtype), conv.stride[0])
    return z


def conv_norm_act(x: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d, act: nn.Module) -> Tensor:
    """act(norm(conv(x)))."""
    dtype = _half_of_autocast(x) if _is_stem(conv) and not x.requires_grad else None
    if dtype is None or torch.compiler.is_compiling() or not suits_norm_act(x, norm, act):
        return norm_act(convolve(x, conv), norm, act)
    z: Tensor = _StemNormAct.apply(x.to(dtype), conv.weight.to(dtype), conv.stride[0], *norm_act_arguments(norm, act))
    return z


def _half_of_autocast(x: Tensor) -> torch.dtype | None:
    """The half precision that autocast gives convolutions of a map that suits our kernels, if it does."""
    if not fused.suits_kernels(x) or not torch.is_autocast_enabled(x.device.type):
        return None
    dtype = torch.get_autocast_dtype(x.device.type)
    return dtype if dtype in HALVES else None


# The first convolution

COLOURS = 3
STEM_CHANNELS = (16, 32, 64)
STEM_TILE = 128
"""Output pixels at a time."""
STEM_PROGRAMS = 1056
"""Most programs that sum up the gradient of the weight."""


def _is_stem(conv: nn.Conv2d) -> bool:
    return (
        conv.in_channels == COLOURS
        and conv.out_channels in STEM_CHANNELS
        and conv.kernel_size == (3, 3)
        and conv.stride in ((1, 1), (2, 2))
        and conv.padding == conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is None
        and conv.training
    )


def stem(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    from flatout.yolo.model import convolution_kernels as kernels

    y = _stem_output(x, weight, stride)
    weight = weight.contiguous(memory_format=torch.channels_last)
    sizes, num = _stem_sizes(x, y), y.shape[1]
    key = (sizes, x.dtype, stride, num, is_aligned(x), is_aligned(weight))
    grid = (ceil_div(sizes[0], STEM_TILE), 1, 1)
    launch(kernels.stem, key, grid, x, weight, y, *sizes, stride, num, STEM_TILE)
    return y


def stem_weight_gradient(dy: Tensor, x: Tensor, stride: int) -> Tensor:
    """The gradient of the weight, with the type of dy."""
    from flatout.yolo.model import convolution_kernels as kernels

    dy = dy.contiguous(memory_format=torch.channels_last)
    (sizes, (programs, tiles), sums), num = _stem_sums(x, dy), dy.shape[1]
    key = (sizes, x.dtype, tiles, stride, num, is_aligned(x), is_aligned(dy))
    launch(kernels.stem_weight_gradient, key, (programs, 1, 1), x, dy, sums, *sizes, tiles, stride, num, STEM_TILE)
    return _stem_gradient(sums, dy.dtype)


def _stem_sums(x: Tensor, y: Tensor) -> tuple[tuple[int, ...], tuple[int, int], Tensor]:
    """Sizes, programs and tiles for each, and memory for the sums of the gradient of the weight."""
    sizes = _stem_sizes(x, y)
    num_tiles = ceil_div(sizes[0], STEM_TILE)
    tiles = ceil_div(num_tiles, STEM_PROGRAMS)
    programs = ceil_div(num_tiles, tiles)
    sums = torch.empty((programs, y.shape[1], 32), dtype=torch.float32, device=x.device)
    return sizes, (programs, tiles), sums


def _stem_gradient(sums: Tensor, dtype: torch.dtype) -> Tensor:
    gradient = sums.sum(0)[:, : 9 * COLOURS].view(-1, 3, 3, COLOURS).permute(0, 3, 1, 2)
    return gradient.to(dtype, memory_format=torch.channels_last)


def _stem_sizes(x: Tensor, y: Tensor) -> tuple[int, int, int, int, int]:
    """Output pixels, height and width of the input, and of the output."""
    return y.numel() // y.shape[1], x.shape[2], x.shape[3], y.shape[2], y.shape[3]


def _stem_output(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """An empty map for the output."""
    height, width = ((side - 1) // stride + 1 for side in x.shape[2:])
    return empty_map(x, x.shape[0], weight.shape[0], height, width)


def _empty_gradient(dy: Tensor, x: Tensor, stride: int) -> Tensor:
    return empty_map(dy, dy.shape[1], COLOURS, 3, 3)


class _Stem(torch.autograd.Function):
    """Without a gradient of the image."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: int, run: Any = stem, run_backward: Any = stem_weight_gradient
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.stride, ctx.run_backward = stride, run_backward
        y: Tensor = run(x, weight, stride)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return None, ctx.run_backward(dy, x, ctx.stride), None, None, None


class _StemNormAct(torch.autograd.Function):
    """With batch norm and activation. The gradient of what is between is not stored: it has no other reader."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, *rest: Any) -> Tensor:
        y = stem(x, weight, stride)
        z, saved = fused.norm_act_forward(y, *rest)
        ctx.save_for_backward(x, y, saved)
        ctx.stride, (ctx.act, ctx.slope) = stride, rest[-2:]
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        from flatout.yolo.model import convolution_kernels as kernels

        x, y, saved = ctx.saved_tensors
        _, dz, factors, *of_norm = fused.norm_act_sums(dz, y, saved, ctx.act, ctx.slope)
        dz, dz_stride = fused.row_stride(dz)
        sizes, (programs, tiles), sums = _stem_sums(x, y)
        num = y.shape[1]
        key = (
            sizes,
            tiles,
            dz_stride,
            x.dtype,
            dz.dtype,
            ctx.slope,
            ctx.act,
            ctx.stride,
            num,
            *map(is_aligned, (x, dz)),
        )
        launch(
            kernels.stem_weight_gradient_of_norm, key, (programs, 1, 1), x, y, dz, saved, factors, sums, *sizes, tiles,
            dz_stride, ctx.slope, ctx.act, fused.uses_tanh(x.dtype), ctx.stride, num, STEM_TILE,
        )  # fmt: skip
        return None, _stem_gradient(sums, x.dtype), None, *of_norm, *fused.NO_GRADIENTS


# Predictions

PREDICT_TILE = (128, 64)
"""Pixels and input channels at a time; with all output channels."""
PREDICT_BACKWARD_TILE = (64, 128, 64)
"""Pixels, input channels, and output channels at a time."""
PREDICT_PROGRAMS = 132
"""Most programs that sum up the gradient of the weight, for 128 input channels each."""
MOST_OUTPUTS = 256


def predict(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The 1 x 1 convolution."""
    num, channels = weight.shape[:2]
    is_slow = num % 8 != 0 and num <= MOST_OUTPUTS and channels % 16 == 0
    dtype = _half_of_autocast(x) if is_slow and torch.is_grad_enabled() else None
    if dtype is None:
        return F.conv2d(x, weight, bias)
    apply = torch.ops.flatout.predict if torch.compiler.is_compiling() else _Predict.apply
    y: Tensor = apply(x.to(dtype), weight, bias)
    return y


def predictions(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from flatout.yolo.model import convolution_kernels as kernels

    y = _empty_predictions(x, weight, bias)
    weight, bias = weight.to(x.dtype).contiguous(), bias.to(x.dtype)
    sizes = _matrix_sizes(x, weight)
    pixels, channels = PREDICT_TILE
    constants = (min(channels, tile_channels(sizes[2])), _all_outputs(sizes[1]), pixels)
    key = (sizes, x.dtype, is_aligned(x), is_aligned(weight), is_aligned(bias))
    grid = (ceil_div(sizes[0], pixels), 1, 1)
    launch(kernels.predictions, key, grid, x, weight, bias, y, *sizes, *constants, num_warps=8)
    return y


def predictions_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    from flatout.yolo.model import convolution_kernels as kernels

    dy, matrix = dy.contiguous(memory_format=torch.channels_last), weight.to(x.dtype).contiguous()
    sizes = num_pixels, num, channels = _matrix_sizes(x, weight)
    pixels, columns, outputs = PREDICT_BACKWARD_TILE
    columns = min(columns, tile_channels(channels))
    key = (sizes, x.dtype, is_aligned(x), is_aligned(matrix), is_aligned(dy))
    dx = torch.empty_like(x)
    num_columns, num_tiles = ceil_div(channels, columns), ceil_div(num_pixels, pixels)
    # Along the first axis of the grid, because CUDA limits the others to 65,535: four million pixels.
    grid = (num_columns * num_tiles, 1, 1)
    launch(kernels.predictions_backward, key, grid, dy, matrix, dx, *sizes, columns, outputs, pixels)
    tiles = ceil_div(num_tiles, PREDICT_PROGRAMS)
    programs = ceil_div(num_tiles, tiles)
    sums = torch.empty((programs, num, channels), dtype=torch.float32, device=x.device)
    bias_sums = torch.empty((programs, num), dtype=torch.float32, device=x.device)
    launch(
        kernels.predictions_weight_gradient, (*key, tiles), (num_columns, programs, 1), x, dy, sums, bias_sums,
        *sizes, tiles, columns, _all_outputs(num), pixels, num_warps=8,
    )  # fmt: skip
    dweight = sums.sum(0).view(weight.shape).to(weight.dtype)
    return dx, dweight, bias_sums.sum(0).to(weight.dtype)


def _matrix_sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Pixels, output channels and input channels."""
    return x.numel() // x.shape[1], weight.shape[0], weight.shape[1]


def _all_outputs(num: int) -> int:
    return max(1 << (num - 1).bit_length(), 16)


def _empty_predictions(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return empty_map(x, x.shape[0], weight.shape[0], x.shape[2], x.shape[3])


def _empty_gradients(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


class _Predict(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor,
        run: Any = predictions, run_backward: Any = predictions_backward,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.run_backward = run_backward
        y: Tensor = run(x, weight, bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return *ctx.run_backward(dy, *ctx.saved_tensors), None, None


_ops = torch.ops.flatout
fused.register(
    {
        "stem(Tensor x, Tensor weight, int stride) -> Tensor": lambda x, weight, stride: _Stem.apply(
            x, weight, stride, _ops.stem_forward, _ops.stem_weight_gradient
        ),
        "predict(Tensor x, Tensor weight, Tensor bias) -> Tensor": lambda x, weight, bias: _Predict.apply(
            x, weight, bias, _ops.predictions, _ops.predictions_backward
        ),
    },
    {
        "stem_forward(Tensor x, Tensor weight, int stride) -> Tensor": (stem, _stem_output),
        "stem_weight_gradient(Tensor dy, Tensor x, int stride) -> Tensor": (stem_weight_gradient, _empty_gradient),
        "predictions(Tensor x, Tensor weight, Tensor bias) -> Tensor": (predictions, _empty_predictions),
        "predictions_backward(Tensor dy, Tensor x, Tensor weight) -> (Tensor, Tensor, Tensor)": (
            predictions_backward, _empty_gradients,
        ),
    },
)  # fmt: skip
