"""Max-pooling by our own kernels on a GPU, without the 8-byte indices that torch stores, and by torch everywhere else.

    max_pool         kernel and stride of 2
    max_pool_same    stride 1, for kernels of 5, 9, 13, ...

Which maps suit the kernels, and the two entry points of each, are described in fused.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels import is_aligned, launch
from flatout.yolo.model import fused
from flatout.yolo.model.fused import empty_map, register, row_stride, tiles

WINDOW = 5
POOL_TILE_VALUES = 4096
WINDOW_TILE_VALUES = 1024


def max_pool(x: Tensor, k: int) -> Tensor:
    """Max-pool with kernel and stride k; an incomplete square at the right or bottom edge is dropped."""
    if k != 2 or not fused.suits_kernels(x) or min(x.shape[2:]) < 2:
        return F.max_pool2d(x, k, k)
    apply = torch.ops.flatout.max_pool_halve if torch.compiler.is_compiling() else _Halve.apply
    z: Tensor = apply(x)
    return z


def max_pool_same(x: Tensor, k: int, narrower: Tensor | None = None, narrower_k: int = 1) -> Tensor:
    """Max-pool with kernel k (odd) and stride 1 that keeps the size of the map.

    With `narrower`, the same map pooled with a smaller kernel `narrower_k`, our kernels begin there.
    """
    if k % (WINDOW - 1) != 1 or not fused.suits_kernels(x):
        return F.max_pool2d(x, k, 1, k // 2)
    # A maximum over 9 is a maximum over 5 of maxima over 5, and so on: the same numbers from smaller windows.
    apply = torch.ops.flatout.max_pool_window if torch.compiler.is_compiling() else _Window.apply
    z = x if narrower is None else narrower
    for _ in range((k - narrower_k) // (WINDOW - 1)):
        z = apply(z)
    return z


def continues(k: int, narrower_k: int) -> bool:
    """Whether max-pooling with kernel k can begin with the result of a smaller kernel."""
    return narrower_k < k and k % (WINDOW - 1) == narrower_k % (WINDOW - 1) == 1


def _halve_sizes(x: Tensor) -> tuple[int, int, int, int, int, int]:
    batch, channels, height, width = x.shape
    return batch * (height // 2) * (width // 2), height, width, channels, height // 2, width // 2


def halve(x: Tensor) -> Tensor:
    from flatout.yolo.model import fused_kernels as kernels

    sizes = _halve_sizes(x)
    grid, tile = tiles(sizes[0], sizes[3], POOL_TILE_VALUES)
    z = _half_map(x)
    launch(kernels.halve, (sizes, x.dtype), grid, x, z, *sizes, *tile)
    return z


def _half_map(x: Tensor) -> Tensor:
    """An empty map of half the height and width."""
    batch, channels, height, width = x.shape
    return empty_map(x, batch, channels, height // 2, width // 2)


def halve_backward(dz: Tensor, x: Tensor) -> Tensor:
    from flatout.yolo.model import fused_kernels as kernels

    sizes = _halve_sizes(x)
    grid, tile = tiles(sizes[0], sizes[3], POOL_TILE_VALUES)
    dz, stride = row_stride(dz)
    is_covered = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
    dx = torch.empty_like(x) if is_covered else torch.zeros_like(x)
    key = (sizes, x.dtype, stride, is_aligned(dz))
    launch(kernels.halve_backward, key, grid, x, dz, dx, *sizes, stride, *tile)
    return dx


def window(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of the 5 x 5 window around each pixel, and what the backward pass needs: for each pixel which one of
    its row, and then of its column, was chosen, uint8."""
    rows, tap_x = _window_line(x, x.shape[3], 1)
    z, tap_y = _window_line(rows, x.shape[2], x.shape[3])
    return z, tap_x, tap_y


def _window_maps(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty maps like those that `window` returns."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8), torch.empty_like(x, dtype=torch.uint8)


def _window_line(x: Tensor, length: int, step: int) -> tuple[Tensor, Tensor]:
    from flatout.yolo.model import fused_kernels as kernels

    channels = x.shape[1]
    sizes = (x.numel() // channels, length, step, channels)
    grid, tile = tiles(sizes[0], channels, WINDOW_TILE_VALUES)
    z, tap = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    launch(kernels.window, (sizes, x.dtype, is_aligned(x)), grid, x, z, tap, *sizes, WINDOW, *tile)
    return z, tap


def window_backward(dz: Tensor, tap_x: Tensor, tap_y: Tensor) -> Tensor:
    dz, stride = row_stride(dz)
    of_rows = _window_line_backward(dz, stride, tap_y, torch.float32, tap_y.shape[2], tap_y.shape[3])
    return _window_line_backward(of_rows, tap_x.shape[1], tap_x, dz.dtype, tap_x.shape[3], 1)


def _window_line_backward(dz: Tensor, stride: int, tap: Tensor, dtype: torch.dtype, length: int, step: int) -> Tensor:
    from flatout.yolo.model import fused_kernels as kernels

    channels = tap.shape[1]
    sizes = (tap.numel() // channels, length, step, channels, stride)
    grid, tile = tiles(sizes[0], channels, WINDOW_TILE_VALUES)
    dx = torch.empty_like(tap, dtype=dtype)
    key = (sizes, dz.dtype, dtype, is_aligned(dz))
    launch(kernels.window_backward, key, grid, dz, tap, dx, *sizes, WINDOW, *tile)
    return dx


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any = halve, run_backward: Any = halve_backward) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run_backward = run_backward
        z: Tensor = run(x)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        return ctx.run_backward(dz, *ctx.saved_tensors), None, None


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any = window, run_backward: Any = window_backward) -> Tensor:
        z, *taps = run(x)
        ctx.save_for_backward(*taps)
        ctx.run_backward = run_backward
        result: Tensor = z
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        return ctx.run_backward(dz, *ctx.saved_tensors), None, None


_ops = torch.ops.flatout
register(
    {
        "max_pool_halve(Tensor x) -> Tensor": lambda x: _Halve.apply(
            x, _ops.max_pool_halve_forward, _ops.max_pool_halve_backward
        ),
        "max_pool_window(Tensor x) -> Tensor": lambda x: _Window.apply(
            x, _ops.max_pool_window_forward, _ops.max_pool_window_backward
        ),
    },
    {
        "max_pool_halve_forward(Tensor x) -> Tensor": (halve, _half_map),
        "max_pool_halve_backward(Tensor dz, Tensor x) -> Tensor": (halve_backward, lambda dz, x: torch.empty_like(x)),
        "max_pool_window_forward(Tensor x) -> (Tensor, Tensor, Tensor)": (window, _window_maps),
        "max_pool_window_backward(Tensor dz, Tensor tap_x, Tensor tap_y) -> Tensor": (
            window_backward, lambda dz, tap_x, tap_y: torch.empty_like(tap_x, dtype=dz.dtype),
        ),
    },
)  # fmt: skip
