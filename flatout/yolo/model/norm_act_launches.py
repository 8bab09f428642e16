"""Launch the kernels of norm_act_kernels.py: three forward, three backward.

The host decides how long a step of small maps takes, so what follows from the shapes and types of a layer is worked
out once (`_plan_forward`, `_plan_backward`), and a call only allocates and hands over addresses.

Dimension key:  C channels   M = pictures x height x width   P blocks of rows
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.engine.launch import ALIGNMENT_BYTES, Pointer, Start, prepared, stream_of
from flatout.yolo.model.map_layout import columns_of, pieces, row_stride

VALUES_PER_TILE = 2048
PROGRAMS = 1056
NUM_WARPS = 8
"""Values that a program of a kernel holds at once, programs of a launch at most, and warps of a program: the best of
eight combinations on an H200, where these kernels move 3.1 to 3.7 TB/s."""

FINISH_TILE = (256, 8)
SAVED_ROWS = 4
"""Rows of what the forward pass keeps, float32 [4, C]: mean, 1 / deviation, scale, shift."""


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    counter: Tensor,
    momentum: float,
    eps: float,
    act: int,
    slope: float,
) -> tuple[Tensor, Tensor]:
    """z like x, and what the backward pass needs, float32 [4 * C]. Moves the running statistics, in place."""
    device, x_at = x.get_device(), x.data_ptr()
    key = (
        x.shape, x.dtype, x_at % ALIGNMENT_BYTES == 0, weight.dtype, running_mean.dtype,
        momentum, eps, act, slope, device,
    )  # fmt: skip
    plan = _forward_plans.get(key) or _keep(_forward_plans, key, _plan_forward)
    z = torch.empty_like(x)
    saved = torch.empty(plan.num_saved, dtype=torch.float32, device=x.device)
    sums = torch.empty(plan.num_scratch, dtype=torch.float32, device=x.device)
    stream, saved_at, sums_at, mean_at = stream_of(device), saved.data_ptr(), sums.data_ptr(), running_mean.data_ptr()
    plan.sum_up(stream, x_at, mean_at, sums_at)
    plan.finish(
        stream, sums_at, mean_at, running_var.data_ptr(), counter.data_ptr(), weight.data_ptr(), bias.data_ptr(),
        saved_at,
    )  # fmt: skip
    plan.apply(stream, x_at, saved_at, z.data_ptr())
    return z, saved


def backward(dz: Tensor, x: Tensor, saved: Tensor, act: int, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    dz, stride = row_stride(dz)
    device, x_at, dz_at = x.get_device(), x.data_ptr(), dz.data_ptr()
    key = (
        x.shape, x.dtype, x_at % ALIGNMENT_BYTES == 0, dz.dtype, dz_at % ALIGNMENT_BYTES == 0, stride,
        act, slope, device,
    )  # fmt: skip
    plan = _backward_plans.get(key) or _keep(_backward_plans, key, _plan_backward)
    dx = torch.empty_like(x)
    # Kept by the optimizer: on their own, so as not to hold the scratch memory.
    dweight = torch.empty(plan.channels, dtype=torch.float32, device=x.device)
    dbias = torch.empty_like(dweight)
    factors = torch.empty(plan.num_scratch, dtype=torch.float32, device=x.device)
    stream, saved_at, factors_at = stream_of(device), saved.data_ptr(), factors.data_ptr()
    sums_at = factors_at + plan.sums_offset_bytes
    plan.sum_up(stream, x_at, dz_at, saved_at, sums_at)
    plan.finish(stream, sums_at, saved_at, dweight.data_ptr(), dbias.data_ptr(), factors_at)
    plan.apply(stream, x_at, dz_at, saved_at, factors_at, dx.data_ptr())
    return dx, dweight, dbias


class _Plan(NamedTuple):
    """What a call needs to know about maps of a shape."""

    sum_up: Start
    finish: Start
    apply: Start
    channels: int
    num_saved: int
    num_scratch: int
    sums_offset_bytes: int


_forward_plans: dict[tuple[Any, ...], _Plan] = {}
_backward_plans: dict[tuple[Any, ...], _Plan] = {}


def _keep(plans: dict[tuple[Any, ...], _Plan], key: tuple[Any, ...], make: Any) -> _Plan:
    plan: _Plan = make(*key[:-1])
    plans[key] = plan
    return plan


class _Cut(NamedTuple):
    """How a map is cut into blocks of rows and channels."""

    rows: int
    channels: int
    blocks: int
    rows_per_block: int
    tile: tuple[int, int]
    grid: tuple[int, int, int]
    finish_grid: tuple[int, int, int]


def _cut(shape: torch.Size) -> _Cut:
    channels, rows = shape[1], shape.numel() // shape[1]
    columns = columns_of(channels)
    num_columns = pieces(channels, columns)
    tile_rows = VALUES_PER_TILE // columns
    wanted = min(pieces(rows, tile_rows), max(1, PROGRAMS // num_columns))
    rows_per_block = pieces(pieces(rows, wanted), tile_rows) * tile_rows
    blocks = pieces(rows, rows_per_block)
    finish_grid = (pieces(channels, FINISH_TILE[1]), 1, 1)
    return _Cut(rows, channels, blocks, rows_per_block, (tile_rows, columns), (blocks, num_columns, 1), finish_grid)


def _plan_forward(
    shape: torch.Size,
    dtype: torch.dtype,
    is_aligned: bool,
    weight_dtype: torch.dtype,
    running_dtype: torch.dtype,
    momentum: float,
    eps: float,
    act: int,
    slope: float,
) -> _Plan:
    from flatout.yolo.model import norm_act_kernels as kernels

    rows, channels, blocks, rows_per_block, tile, grid, finish_grid = _cut(shape)
    x, z, running, weight = Pointer(dtype, is_aligned), Pointer(dtype), Pointer(running_dtype), Pointer(weight_dtype)
    sum_up = prepared(
        kernels.sum_rows, grid, (x, running, FLOATS), (rows, channels, blocks, rows_per_block, *tile), NUM_WARPS
    )
    finish = prepared(
        kernels.finish_forward, finish_grid, (FLOATS, running, running, COUNTER, weight, weight, FLOATS),
        (rows, channels, blocks, float(eps), float(momentum), *FINISH_TILE),
    )  # fmt: skip
    apply = prepared(
        kernels.apply_forward, grid, (x, FLOATS, z),
        (rows, channels, rows_per_block, slope, act, dtype != torch.float32, *tile), NUM_WARPS,
    )  # fmt: skip
    return _Plan(sum_up, finish, apply, channels, SAVED_ROWS * channels, 2 * blocks * channels, 0)


def _plan_backward(
    shape: torch.Size,
    dtype: torch.dtype,
    is_aligned: bool,
    gradient_dtype: torch.dtype,
    is_gradient_aligned: bool,
    stride: int,
    act: int,
    slope: float,
) -> _Plan:
    from flatout.yolo.model import norm_act_kernels as kernels

    rows, channels, blocks, rows_per_block, tile, grid, finish_grid = _cut(shape)
    x, dx, dz = Pointer(dtype, is_aligned), Pointer(dtype), Pointer(gradient_dtype, is_gradient_aligned)
    act_and_tile = (slope, act, dtype != torch.float32, *tile)
    sum_up = prepared(
        kernels.sum_gradients, grid, (x, dz, FLOATS, FLOATS),
        (rows, channels, blocks, stride, rows_per_block, *act_and_tile), NUM_WARPS,
    )  # fmt: skip
    finish = prepared(kernels.finish_backward, finish_grid, (FLOATS,) * 5, (rows, channels, blocks, *FINISH_TILE))
    apply = prepared(
        kernels.apply_backward, grid, (x, dz, FLOATS, FLOATS, dx),
        (rows, channels, stride, rows_per_block, *act_and_tile), NUM_WARPS,
    )  # fmt: skip
    num_factors = pieces(2 * channels, ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return _Plan(sum_up, finish, apply, channels, 0, num_factors + 2 * blocks * channels, 4 * num_factors)


FLOATS = Pointer(torch.float32)
COUNTER = Pointer(torch.int64)
