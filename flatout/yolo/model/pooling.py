"""Max-pooling: by our kernels for channels_last maps on a GPU, which store no 8-byte indices, else by torch.

As in norm_act.py there are two doors to the kernels, for eager mode and for torch.compile.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels import is_aligned, launch
from flatout.yolo.model.norm_act import columns_of, pieces, row_stride, suits_kernels

WINDOW = 5
VALUES_PER_TILE = 4096


def max_pool(x: Tensor, k: int) -> Tensor:
    """The largest of each k x k square; what is left over at the right and below is left out."""
    if k != 2 or not suits_kernels(x) or min(x.shape[2:]) < 2:
        return F.max_pool2d(x, k, k)
    apply = torch.ops.flatout.max_pool_halve if torch.compiler.is_compiling() else _Halve.apply
    z: Tensor = apply(x)
    return z


def max_pool_same(x: Tensor, k: int) -> Tensor:
    """The largest of the k x k window around each pixel, k odd."""
    if k % (WINDOW - 1) != 1 or not suits_kernels(x):
        return F.max_pool2d(x, k, 1, k // 2)
    # A maximum over 9 is one over 5 of maxima over 5, and so on: the same numbers from smaller windows.
    apply = torch.ops.flatout.max_pool_window if torch.compiler.is_compiling() else _Window.apply
    for _ in range(k // (WINDOW - 1)):
        x = apply(x)
    return x


def _tiles(num_pixels: int, channels: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Grid and tile of a launch in which every program does one tile."""
    columns = columns_of(channels)
    rows = VALUES_PER_TILE // columns
    return (pieces(num_pixels, rows), pieces(channels, columns), 1), (rows, columns)


def _halve_sizes(x: Tensor) -> tuple[int, int, int, int, int, int]:
    batch, channels, height, width = x.shape
    return batch * (height // 2) * (width // 2), height, width, channels, height // 2, width // 2


def halve(x: Tensor) -> Tensor:
    from flatout.yolo.model import pooling_kernels as kernels

    sizes = _halve_sizes(x)
    grid, tile = _tiles(sizes[0], sizes[3])
    z = _half_map(x)
    launch(kernels.halve, (sizes, x.dtype), grid, x, z, *sizes, *tile)
    return z


def _half_map(x: Tensor) -> Tensor:
    """Room for the result."""
    batch, channels, height, width = x.shape
    shape = (batch, channels, height // 2, width // 2)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def halve_backward(dz: Tensor, x: Tensor) -> Tensor:
    from flatout.yolo.model import pooling_kernels as kernels

    sizes = _halve_sizes(x)
    grid, tile = _tiles(sizes[0], sizes[3])
    dz, stride = row_stride(dz)
    is_covered = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
    dx = torch.empty_like(x) if is_covered else torch.zeros_like(x)
    key = (sizes, x.dtype, stride, is_aligned(dz))
    launch(kernels.halve_backward, key, grid, x, dz, dx, *sizes, stride, *tile)
    return dx


def window(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of the 5 x 5 window around each pixel, and which of the 25 it was, uint8."""
    from flatout.yolo.model import pooling_kernels as kernels

    batch, channels, height, width = x.shape
    sizes = (batch * height * width, height, width, channels)
    grid, tile = _tiles(sizes[0], channels)
    z, tap = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    launch(kernels.window, (sizes, x.dtype), grid, x, z, tap, *sizes, WINDOW, *tile)
    return z, tap


def window_backward(dz: Tensor, tap: Tensor) -> Tensor:
    from flatout.yolo.model import pooling_kernels as kernels

    batch, channels, height, width = tap.shape
    sizes = (batch * height * width, height, width, channels)
    grid, tile = _tiles(sizes[0], channels)
    dz, stride = row_stride(dz)
    dx = torch.empty_like(tap, dtype=dz.dtype)
    key = (sizes, dz.dtype, stride, is_aligned(dz))
    launch(kernels.window_backward, key, grid, dz, tap, dx, *sizes, stride, WINDOW, *tile)
    return dx


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return halve(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        return halve_backward(dz, *ctx.saved_tensors)


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        z, tap = window(x)
        ctx.save_for_backward(tap)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        return window_backward(dz, *ctx.saved_tensors)


# For torch.compile, as in norm_act.py: composites of autograd functions around operators that know no derivative.


class _TracedHalve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        z: Tensor = torch.ops.flatout.max_pool_halve_forward(x)
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        dx: Tensor = torch.ops.flatout.max_pool_halve_backward(dz, *ctx.saved_tensors)
        return dx


class _TracedWindow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        z, tap = torch.ops.flatout.max_pool_window_forward(x)
        ctx.save_for_backward(tap)
        result: Tensor = z
        return result

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        dx: Tensor = torch.ops.flatout.max_pool_window_backward(dz, *ctx.saved_tensors)
        return dx


_library = torch.library.Library("flatout", "FRAGMENT")
for _schema in (
    "max_pool_halve(Tensor x) -> Tensor",
    "max_pool_halve_forward(Tensor x) -> Tensor",
    "max_pool_halve_backward(Tensor dz, Tensor x) -> Tensor",
    "max_pool_window(Tensor x) -> Tensor",
    "max_pool_window_forward(Tensor x) -> (Tensor, Tensor)",
    "max_pool_window_backward(Tensor dz, Tensor tap) -> Tensor",
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)
_library.impl("max_pool_halve", _TracedHalve.apply, "CompositeImplicitAutograd")
_library.impl("max_pool_window", _TracedWindow.apply, "CompositeImplicitAutograd")
for _name, _run, _fake in (
    ("max_pool_halve_forward", halve, _half_map),
    ("max_pool_halve_backward", halve_backward, lambda dz, x: torch.empty_like(x)),
    ("max_pool_window_forward", window, lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8))),
    ("max_pool_window_backward", window_backward, lambda dz, tap: torch.empty_like(tap, dtype=dz.dtype)),
):
    _library.impl(_name, _run, "CUDA")
    torch.library.register_fake(f"flatout::{_name}", _fake, lib=_library)
