"""Batch norm and activation in one go while training on a GPU; torch's own modules everywhere else.

torch passes over a map 13 times for this pair, forward and backward; the kernels here pass over it 8 times
(bench/model_step.py says what that is worth). They want channels_last maps and one of the ACTS; what they cannot do
goes through torch, with the same result.

The kernels are reached by two doors: an autograd function, which costs the host least, and operators for
torch.compile.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.engine.launch import is_aligned, launch
from flatout.yolo.model.map_layout import columns_of, pieces, row_stride, suits_kernels

ACTS = {nn.Identity: 0, nn.SiLU: 1, nn.LeakyReLU: 2, nn.ReLU: 2}
"""Activation -> its number in norm_act_kernels.py; ReLU is a LeakyReLU of slope 0."""

VALUES_PER_TILE = 2048
PROGRAMS = 1056
NUM_WARPS = 8
"""Values that a program of a kernel holds at once, programs of a launch at most, and warps of a program: the best of
eight combinations on an H200, where these kernels move 3.1 to 3.7 TB/s."""

FINISH_TILE = (256, 8)
MOVE_TILE = 256


def norm_act(x: Tensor, norm: nn.BatchNorm2d | nn.SyncBatchNorm, act: nn.Module) -> Tensor:
    """act(norm(x)); in training also moves the running statistics, as `norm` does."""
    if not _suits(x, norm, act):
        y: Tensor = act(norm(x))
        return y
    choice = (norm.eps, ACTS[type(act)], float(getattr(act, "negative_slope", 0.0)))
    statistics: Any = (norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum)
    if torch.compiler.is_compiling():
        z, saved = torch.ops.flatout.norm_act(x, norm.weight, norm.bias, norm.running_mean, *choice)
        torch.ops.flatout.move_statistics(saved, *statistics)
    else:
        z, saved = _NormAct.apply(x, norm.weight, norm.bias, norm.running_mean, *choice)
        move_statistics(saved, *statistics)
    result: Tensor = z
    return result


def _suits(x: Tensor, norm: nn.BatchNorm2d | nn.SyncBatchNorm, act: nn.Module) -> bool:
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.momentum is not None
        and type(act) in ACTS
        and suits_kernels(x)
        and x.numel() > x.shape[1]
    )


class _Cut(NamedTuple):
    """How a map is cut into blocks of rows and channels."""

    rows: int
    channels: int
    blocks: int
    rows_per_block: int
    tile: tuple[int, int]
    grid: tuple[int, int, int]
    finish_grid: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _cut(rows: int, channels: int) -> _Cut:
    columns = columns_of(channels)
    num_columns = pieces(channels, columns)
    tile_rows = VALUES_PER_TILE // columns
    wanted = min(pieces(rows, tile_rows), max(1, PROGRAMS // num_columns))
    rows_per_block = pieces(pieces(rows, wanted), tile_rows) * tile_rows
    blocks = pieces(rows, rows_per_block)
    finish_grid = (pieces(channels, FINISH_TILE[1]), 1, 1)
    return _Cut(rows, channels, blocks, rows_per_block, (tile_rows, columns), (blocks, num_columns, 1), finish_grid)


def norm_act_forward(
    x: Tensor, weight: Tensor, bias: Tensor, pivot: Tensor, eps: float, act: int, slope: float
) -> tuple[Tensor, Tensor]:
    """z like x, and per channel [5, C]: mean, 1 / deviation, scale, shift, unbiased variance."""
    from flatout.yolo.model import norm_act_kernels as kernels

    rows, channels, blocks, rows_per_block, tile, grid, finish_grid = cut = _cut(x.numel() // x.shape[1], x.shape[1])
    half = x.dtype != torch.float32
    key = (cut, x.dtype, weight.dtype, act, slope, eps)
    sums = x.new_empty((2, blocks, channels), dtype=torch.float32)
    saved = x.new_empty((5, channels), dtype=torch.float32)
    z = torch.empty_like(x)
    launch(
        kernels.sum_rows, key, grid, x, pivot, sums, rows, channels, blocks, rows_per_block, *tile, num_warps=NUM_WARPS
    )
    launch(
        kernels.finish_forward, key, finish_grid,
        sums, pivot, weight, bias, saved, rows, channels, blocks, eps, *FINISH_TILE,
    )  # fmt: skip
    launch(
        kernels.apply_forward, key, grid,
        x, saved, z, rows, channels, rows_per_block, slope, act, half, *tile, num_warps=NUM_WARPS,
    )  # fmt: skip
    return z, saved


def norm_act_backward(dz: Tensor, x: Tensor, saved: Tensor, act: int, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    from flatout.yolo.model import norm_act_kernels as kernels

    rows, channels, blocks, rows_per_block, tile, grid, finish_grid = cut = _cut(x.numel() // x.shape[1], x.shape[1])
    dz, stride = row_stride(dz)
    half = x.dtype != torch.float32
    key = (cut, x.dtype, dz.dtype, act, slope, stride, is_aligned(dz))
    sums = x.new_empty((2, blocks, channels), dtype=torch.float32)
    factors = x.new_empty((2, channels), dtype=torch.float32)
    dweight, dbias = x.new_empty(channels, dtype=torch.float32), x.new_empty(channels, dtype=torch.float32)
    dx = torch.empty_like(x)
    launch(
        kernels.sum_gradients, key, grid,
        x, dz, saved, sums, rows, channels, blocks, stride, rows_per_block, slope, act, half, *tile,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    launch(
        kernels.finish_backward, key, finish_grid,
        sums, saved, dweight, dbias, factors, rows, channels, blocks, *FINISH_TILE,
    )  # fmt: skip
    launch(
        kernels.apply_backward, key, grid,
        x, dz, saved, factors, dx, rows, channels, stride, rows_per_block, slope, act, half, *tile,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return dx, dweight, dbias


def move_statistics(saved: Tensor, running_mean: Tensor, running_var: Tensor, counter: Tensor, momentum: float) -> None:
    """Move the running statistics towards those of this batch, in place."""
    from flatout.yolo.model import norm_act_kernels as kernels

    channels = saved.shape[1]
    grid = (pieces(channels, MOVE_TILE), 1, 1)
    key = (channels, momentum, running_mean.dtype)
    launch(
        kernels.move_statistics, key, grid,
        saved, running_mean, running_var, counter, channels, momentum, MOVE_TILE,
    )  # fmt: skip


class _NormAct(torch.autograd.Function):
    """The door for eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        z, saved = norm_act_forward(x, *rest)
        ctx.save_for_backward(x, saved)
        ctx.act, ctx.slope = rest[-2:]
        ctx.mark_non_differentiable(saved)
        return z, saved

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor, _: Tensor) -> tuple[Any, ...]:
        x, saved = ctx.saved_tensors
        gradients = norm_act_backward(dz, x, saved, ctx.act, ctx.slope)
        return (*gradients, None, None, None, None)


# The door for torch.compile: operators that it does not look into. If it did, it would compile each of the several
# hundred launches of a network anew, for minutes.


@torch.library.custom_op("flatout::norm_act", mutates_args=())
def _norm_act_op(
    x: Tensor, weight: Tensor, bias: Tensor, pivot: Tensor, eps: float, act: int, slope: float
) -> tuple[Tensor, Tensor]:
    return norm_act_forward(x, weight, bias, pivot, eps, act, slope)


@torch.library.custom_op("flatout::norm_act_backward", mutates_args=())
def _norm_act_backward_op(
    dz: Tensor, x: Tensor, saved: Tensor, act: int, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    return norm_act_backward(dz, x, saved, act, slope)


@torch.library.custom_op("flatout::move_statistics", mutates_args=("running_mean", "running_var", "counter"))
def _move_statistics_op(
    saved: Tensor, running_mean: Tensor, running_var: Tensor, counter: Tensor, momentum: float
) -> None:
    move_statistics(saved, running_mean, running_var, counter, momentum)


@_norm_act_op.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((5, x.shape[1]), dtype=torch.float32)


@_norm_act_backward_op.register_fake
def _(dz: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_channels = x.new_empty(x.shape[1], dtype=torch.float32)
    return torch.empty_like(x), of_channels, torch.empty_like(of_channels)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.act, ctx.slope = inputs[-2:]


def _differentiate(ctx: Any, dz: Tensor, _: Tensor) -> tuple[Any, ...]:
    gradients = torch.ops.flatout.norm_act_backward(dz, *ctx.saved_tensors, ctx.act, ctx.slope)
    return (*gradients, None, None, None, None)


_norm_act_op.register_autograd(_differentiate, setup_context=_keep)
