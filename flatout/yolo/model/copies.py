"""Upsampling, concatenation, and sums of the gradients of a map with several readers, by our own kernels on a GPU.

    double, concat, forked

torch.compile makes such kernels itself, so these are for eager mode and CUDA graphs; all else goes through torch.
Which maps suit the kernels is described in fused.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels import is_aligned, launch
from flatout.yolo.model import fused
from flatout.yolo.model.fused import ceil_div, empty_map, row_stride, tiles

COPY_TILE_VALUES = 2048
AT_ONCE = 4
"""Most maps that one launch joins or adds."""


def _suits_copies(*xs: Tensor) -> bool:
    return not torch.compiler.is_compiling() and len({x.dtype for x in xs}) == 1 and all(map(fused.suits_kernels, xs))


def double(x: Tensor) -> Tensor:
    """The map with each pixel as a 2 x 2 square: upsampled by 2, nearest."""
    if not _suits_copies(x):
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
    z: Tensor = _Double.apply(x)
    return z


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from flatout.yolo.model import fused_kernels as kernels

        batch, channels, height, width = x.shape
        ctx.sizes = (batch * height * width, width, channels)
        ctx.shape = x.shape
        z = empty_map(x, batch, channels, 2 * height, 2 * width)
        grid, tile = tiles(ctx.sizes[0], channels, COPY_TILE_VALUES // 2)
        launch(kernels.double, (ctx.sizes, x.dtype, is_aligned(x)), grid, x, z, *ctx.sizes, *tile)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        from flatout.yolo.model import fused_kernels as kernels

        dz, stride = row_stride(dz)
        dx = empty_map(dz, *ctx.shape)
        grid, tile = tiles(ctx.sizes[0], ctx.shape[1], COPY_TILE_VALUES // 2)
        key = (ctx.sizes, dz.dtype, stride, is_aligned(dz))
        launch(kernels.double_backward, key, grid, dz, dx, *ctx.sizes, stride, *tile)
        return dx


def concat(xs: Sequence[Tensor]) -> Tensor:
    """The maps side by side along the channels."""
    if not _suits_copies(*xs) or len({x.shape[2:] for x in xs}) > 1:
        return torch.cat(tuple(xs), 1)
    z: Tensor = _Concat.apply(*xs)
    return z


class _Concat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.channels = [x.shape[1] for x in xs]
        batch, _, height, width = xs[0].shape
        z = empty_map(xs[0], batch, sum(ctx.channels), height, width)
        first = 0
        for begin in range(0, len(xs), AT_ONCE):
            some = xs[begin : begin + AT_ONCE]
            _join(some, z[:, first:])
            first += sum(ctx.channels[begin : begin + AT_ONCE])
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, ...]:
        slices: tuple[Tensor, ...] = dz.split(ctx.channels, 1)
        return slices


def _join(xs: tuple[Tensor, ...], z: Tensor) -> None:
    """Write the maps side by side into the first channels of `z`, a slice of a map."""
    from flatout.yolo.model import fused_kernels as kernels

    num_pixels, channels = xs[0].numel() // xs[0].shape[1], [x.shape[1] for x in xs]
    (rows, columns) = tiles(num_pixels, min(channels), COPY_TILE_VALUES)[1]
    missing = AT_ONCE - len(xs)
    sizes = (num_pixels, *channels, *[0] * missing, z.stride(3))
    grid = (ceil_div(num_pixels, rows), sum(ceil_div(each, columns) for each in channels), 1)
    key = (sizes, z.dtype, is_aligned(z), *map(is_aligned, xs))
    launch(kernels.join, key, grid, *xs, *xs[:1] * missing, z, *sizes, rows, columns)


def forked(x: Tensor, num: int) -> list[Tensor]:
    """The map for each of its readers, so that our kernel adds up their gradients, slices of wider maps among them."""
    if num < 2 or not (x.requires_grad and torch.is_grad_enabled() and _suits_copies(x)):
        return [x] * num
    return list(_Fork.apply(x, num))


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(num))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        known = [each for each in gradients if each is not None]
        if len({each.dtype for each in known}) > 1:
            return sum(known), None  # type: ignore[return-value]
        while len(known) > 1:
            known = [_added(known[:AT_ONCE]), *known[AT_ONCE:]]
        return (known[0] if known else None), None


def _added(xs: Sequence[Tensor]) -> Tensor:
    from flatout.yolo.model import fused_kernels as kernels

    maps, strides = zip(*map(row_stride, xs), strict=True)
    channels = xs[0].shape[1]
    missing = AT_ONCE - len(xs)
    sizes = (xs[0].numel() // channels, channels, *strides, *strides[:1] * missing)
    grid, tile = tiles(sizes[0], channels, COPY_TILE_VALUES)
    z = empty_map(xs[0], *xs[0].shape)
    key = (sizes, len(xs), z.dtype, *map(is_aligned, maps))
    launch(kernels.add, key, grid, *maps, *maps[:1] * missing, z, *sizes, len(xs), *tile)
    return z
