"""Batch norm with activation, by our own kernels on a GPU and by torch everywhere else; what all our kernels share.

    norm_act         batch norm and activation in training. torch passes over a map 13 times for this pair, forward and
                     backward; our kernels pass over it 8 times (measured by bench/model_step.py)
    norm_act_pair    the same for two slices of a map, which two convolutions computed as one give

The kernels (fused_kernels.py; also those of pooling.py and copies.py) need channels_last maps and, for norm_act, one of
the ACTS. Everything else goes through torch, with the same result. Each kernel has two entry points: an autograd
function for eager mode, which costs the host least, and operators for torch.compile.

Dimension key:  C channels   M = images x height x width   P blocks of rows
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.kernels import ALIGNMENT_BYTES, HAS_TRITON, Pointer, Start, prepared, stream_of

logger = logging.getLogger(__name__)

# Maps as rows of channels, [M, C]: which ones the kernels can read, and how they are divided into tiles

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def suits_kernels(x: Tensor) -> bool:
    """Whether `x` is a channels_last map on the current GPU, of a supported type, and Triton is installed.

    The kernels are then faster than torch's, also for small maps, because they cost the host less
    (bench/results/model_step_ideas_h200_202611.md).
    """
    if not x.is_cuda or x.dtype not in DTYPES or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if torch.compiler.is_compiling():
        return HAS_TRITON
    if not HAS_TRITON:
        warn_triton_missing()
        return False
    return x.get_device() == torch.cuda.current_device()


@functools.cache
def warn_triton_missing() -> None:
    """Warn once that there is a GPU but no Triton."""
    logger.warning(
        "Triton is not installed: batch norms, activations and pooling go through torch, and a training step takes "
        "about 1.5 times as long. Install it with `pip install triton`."
    )


def row_stride(x: Tensor) -> tuple[Tensor, int]:
    """A map with equally spaced pixels, and their distance in values.

    The map is `x` itself if possible, also if it is a slice of a wider channels_last map, as gradients of a
    concatenation are; otherwise a copy.
    """
    batch, channels, height, width = x.stride()
    pixels = x.shape[2] * x.shape[3]
    if channels == 1 and width >= x.shape[1] and height == width * x.shape[3] and batch == width * pixels:
        return x, width
    return x.contiguous(memory_format=torch.channels_last), x.shape[1]


def empty_map(like: Tensor, batch: int, channels: int, height: int, width: int) -> Tensor:
    """A channels_last map, not initialised, with the type of `like` and on its device."""
    shape = (batch, channels, height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def tile_channels(channels: int) -> int:
    """Number of channels in a tile."""
    return min(max(1 << (channels - 1).bit_length(), 16), 128)


def ceil_div(total: int, size: int) -> int:
    return -(-total // size)


def tiles(num_pixels: int, channels: int, values: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Grid and tile of a launch with one tile of so many values per program."""
    columns = tile_channels(channels)
    rows = values // columns
    return (ceil_div(num_pixels, rows), ceil_div(channels, columns), 1), (rows, columns)


# Operators for torch.compile, which does not trace into them. Otherwise it would compile each of the several hundred
# launches of a network separately, for minutes.
#
# The operation itself does not appear in compiled graphs: it is a composite of an autograd function around operators
# which have no derivative. A layer then costs the host least; bench/results/model_step_ideas_h200_202611.md compares
# the alternatives. The autograd function is that of eager mode, which gets the operators as its last arguments; only
# batch norm, of which there are most, has one for each.

_library = torch.library.Library("flatout", "FRAGMENT")


def register(
    composites: Mapping[str, Callable[..., Any]], kernels: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]
) -> None:
    """Define operators by their schemas. A kernel's second function gives empty results like those of the first."""
    for schema in (*composites, *kernels):
        _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for schema, run in composites.items():
        _library.impl(schema.partition("(")[0], run, "CompositeImplicitAutograd")
    for schema, (run, empty) in kernels.items():
        _library.impl(schema.partition("(")[0], run, "CUDA")
        torch.library.register_fake(f"flatout::{schema.partition('(')[0]}", empty, lib=_library)


# Batch norm and activation

ACTS = {nn.Identity: 0, nn.SiLU: 1, nn.LeakyReLU: 2, nn.ReLU: 2}
"""Activation -> its number in fused_kernels.py; ReLU is a LeakyReLU of slope 0."""


def norm_act(x: Tensor, norm: nn.BatchNorm2d | nn.SyncBatchNorm, act: nn.Module) -> Tensor:
    """act(norm(x)); in training it also updates the running statistics, as `norm` does."""
    if not suits_norm_act(x, norm, act):
        y: Tensor = act(norm(x))
        return y
    fused = torch.ops.flatout.norm_act if torch.compiler.is_compiling() else _apply
    z: Tensor = fused(x, *norm_act_arguments(norm, act))
    return z


def norm_act_arguments(norm: nn.BatchNorm2d | nn.SyncBatchNorm, act: nn.Module) -> tuple[Any, ...]:
    """What `norm_act_forward` needs beside the map."""
    return (
        norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked,
        norm.momentum, norm.eps, ACTS[type(act)], float(getattr(act, "negative_slope", 0.0)),
    )  # fmt: skip


def suits_norm_act(x: Tensor, norm: nn.Module | None, act: nn.Module) -> bool:
    """Whether `norm_act` of maps like x goes through our kernels."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and type(act) in ACTS
        and suits_kernels(x)
        and x.numel() > x.shape[1]
    )


def norm_act_pair(
    x: Tensor, norms: tuple[nn.BatchNorm2d, nn.BatchNorm2d], acts: tuple[nn.Module, nn.Module]
) -> tuple[Tensor, Tensor]:
    """`norm_act` of the first and of the last channels of a map, by our kernels; both must suit them."""
    first, second = _NormActPair.apply(
        x, *norm_act_arguments(norms[0], acts[0]), *norm_act_arguments(norms[1], acts[1])
    )
    return first, second


class _NormActPair(torch.autograd.Function):
    """Reads the input and writes its gradient as two slices, without copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        ctx.num_first = rest[0].shape[0]
        ctx.acts = (rest[7:9], rest[16:18])
        results = [
            norm_act_forward(part, *arguments, x.shape[1])  # type: ignore[call-arg]
            for part, arguments in zip(_halves(x, ctx.num_first), (rest[:9], rest[9:]), strict=True)
        ]
        ctx.save_for_backward(x, *(saved for _, saved in results))
        return results[0][0], results[1][0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        dx = torch.empty_like(x)
        inputs = zip(_halves(x, ctx.num_first), saved, strict=True)
        parts = zip(gradients, inputs, ctx.acts, _halves(dx, ctx.num_first), strict=True)
        own = [norm_act_backward(dz, *part, *act, x.shape[1], into)[1:] for dz, part, act, into in parts]  # type: ignore[call-arg]
        return (dx, *own[0], *NO_GRADIENTS, *own[1], *NO_GRADIENTS)


def _halves(x: Tensor, num_first: int) -> tuple[Tensor, Tensor]:
    return x[:, :num_first], x[:, num_first:]


class _NormAct(torch.autograd.Function):
    """Entry point for eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        z, saved = norm_act_forward(x, *rest)
        ctx.save_for_backward(x, saved)
        ctx.act, ctx.slope = rest[-2:]
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _backward_once(ctx, dz)
        x, saved = ctx.saved_tensors
        return (*norm_act_backward(dz, x, saved, ctx.act, ctx.slope), *NO_GRADIENTS)


@torch.autograd.function.once_differentiable
def _backward_once(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    """The backward pass under create_graph=True, whose results raise if they are differentiated again.

    A separate function, because the guard costs the host time.
    """
    x, saved = ctx.saved_tensors
    return (*norm_act_backward(dz, x, saved, ctx.act, ctx.slope), *NO_GRADIENTS)


NO_GRADIENTS = (None,) * 7
"""Gradients of the running statistics and of the numbers."""

# Skips the check for functorch transforms in Function.apply, which takes a third of the call: the transforms cannot
# trace our launches, and end in an error either way.
_apply = super(torch.autograd.Function, _NormAct).apply


# Launches of the batch norm kernels: three forward, three backward
#
# With small maps the host limits the step time. Everything that follows from the shapes and types of a layer is
# therefore computed once (`_plan_forward`, `_plan_backward`); a call only allocates memory and passes addresses.

FLOATS = Pointer(torch.float32)
COUNTER = Pointer(torch.int64)

NORM_TILE_VALUES = 2048
PROGRAMS = 1056
NUM_WARPS = 8
"""Values per program at a time, most programs per launch, and warps per program: the best of eight combinations on an
H200, where these kernels reach 3.1 to 3.7 TB/s."""

FINISH_TILE = (256, 8)
SAVED_ROWS = 4
"""Rows of what the forward pass saves, float32 [4, C]: mean, 1 / deviation, scale, shift."""


def norm_act_forward(
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
    x_stride: int = 0,
) -> tuple[Tensor, Tensor]:
    """The output, with the shape and type of x, and what the backward pass needs, float32 [4 * C].

    Updates the running statistics in place. `x_stride` is the distance of pixels if x is a slice of a wider map.
    """
    x_stride = x_stride or x.shape[1]
    device, x_at = x.get_device(), x.data_ptr()
    key = (
        x.shape, x_stride, x.dtype, x_at % ALIGNMENT_BYTES == 0, weight.dtype, running_mean.dtype,
        momentum, eps, act, slope, device,
    )  # fmt: skip
    plan = _forward_plans.get(key) or _add_plan(_forward_plans, key, _plan_forward)
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
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


def norm_act_backward(
    dz: Tensor, x: Tensor, saved: Tensor, act: int, slope: float, x_stride: int = 0, dx: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias. If x is a slice of a wider map, `dx` is the same slice of its gradient."""
    plan, dz, factors, dweight, dbias = norm_act_sums(dz, x, saved, act, slope, x_stride)
    dx = torch.empty_like(x) if dx is None else dx
    plan.apply(
        stream_of(x.get_device()), x.data_ptr(), dz.data_ptr(), saved.data_ptr(), factors.data_ptr(), dx.data_ptr()
    )
    return dx, dweight, dbias


def norm_act_sums(
    dz: Tensor, x: Tensor, saved: Tensor, act: int, slope: float, x_stride: int = 0
) -> tuple["_Plan", Tensor, Tensor, Tensor, Tensor]:
    """The first part of `norm_act_backward`: its plan, dz as equally spaced pixels, the factors of x and 1 in dx (which
    begin the tensor), and the gradients of weight and bias."""
    dz, stride = row_stride(dz)
    x_stride = x_stride or x.shape[1]
    device, x_at, dz_at = x.get_device(), x.data_ptr(), dz.data_ptr()
    key = (
        x.shape, x_stride, x.dtype, x_at % ALIGNMENT_BYTES == 0, dz.dtype, dz_at % ALIGNMENT_BYTES == 0, stride,
        act, slope, device,
    )  # fmt: skip
    plan = _backward_plans.get(key) or _add_plan(_backward_plans, key, _plan_backward)
    # Separate tensors, because the optimizer keeps them, and a view would keep the scratch memory alive.
    dweight = torch.empty(plan.channels, dtype=torch.float32, device=x.device)
    dbias = torch.empty_like(dweight)
    factors = torch.empty(plan.num_scratch, dtype=torch.float32, device=x.device)
    stream, saved_at, factors_at = stream_of(device), saved.data_ptr(), factors.data_ptr()
    sums_at = factors_at + plan.sums_offset_bytes
    plan.sum_up(stream, x_at, dz_at, saved_at, sums_at)
    plan.finish(stream, sums_at, saved_at, dweight.data_ptr(), dbias.data_ptr(), factors_at)
    return plan, dz, factors, dweight, dbias


def uses_tanh(dtype: torch.dtype) -> bool:
    """Whether kernels compute sigmoids of such maps, on the current GPU, by NVIDIA's instruction for tanh."""
    return dtype != torch.float32 and _has_tanh(torch.cuda.current_device())


@functools.cache
def _has_tanh(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 5)


class _Plan(NamedTuple):
    """Compiled launches and buffer sizes for maps of one shape and type."""

    sum_up: Start
    finish: Start
    apply: Start
    channels: int
    num_saved: int
    num_scratch: int
    sums_offset_bytes: int


_forward_plans: dict[tuple[Any, ...], _Plan] = {}
_backward_plans: dict[tuple[Any, ...], _Plan] = {}


def _add_plan(plans: dict[tuple[Any, ...], _Plan], key: tuple[Any, ...], make: Any) -> _Plan:
    plan: _Plan = make(*key[:-1])
    plans[key] = plan
    return plan


class _Tiling(NamedTuple):
    """How a map is divided into blocks of rows and channels."""

    rows: int
    channels: int
    blocks: int
    rows_per_block: int
    tile: tuple[int, int]
    grid: tuple[int, int, int]
    finish_grid: tuple[int, int, int]


def _tile_rows(shape: torch.Size) -> _Tiling:
    channels, rows = shape[1], shape.numel() // shape[1]
    columns = tile_channels(channels)
    num_columns = ceil_div(channels, columns)
    tile_rows = NORM_TILE_VALUES // columns
    wanted = min(ceil_div(rows, tile_rows), max(1, PROGRAMS // num_columns))
    rows_per_block = ceil_div(ceil_div(rows, wanted), tile_rows) * tile_rows
    blocks = ceil_div(rows, rows_per_block)
    finish_grid = (ceil_div(channels, FINISH_TILE[1]), 1, 1)
    return _Tiling(rows, channels, blocks, rows_per_block, (tile_rows, columns), (blocks, num_columns, 1), finish_grid)


def _plan_forward(
    shape: torch.Size,
    x_stride: int,
    dtype: torch.dtype,
    is_aligned: bool,
    weight_dtype: torch.dtype,
    running_dtype: torch.dtype,
    momentum: float,
    eps: float,
    act: int,
    slope: float,
) -> _Plan:
    from flatout.yolo.model import fused_kernels as kernels

    rows, channels, blocks, rows_per_block, tile, grid, finish_grid = _tile_rows(shape)
    x, z, running, weight = Pointer(dtype, is_aligned), Pointer(dtype), Pointer(running_dtype), Pointer(weight_dtype)
    sum_up = prepared(
        kernels.sum_rows, grid, (x, running, FLOATS),
        (rows, channels, blocks, x_stride, rows_per_block, *tile), NUM_WARPS,
    )  # fmt: skip
    finish = prepared(
        kernels.finish_forward, finish_grid, (FLOATS, running, running, COUNTER, weight, weight, FLOATS),
        (rows, channels, blocks, float(eps), float(momentum), *FINISH_TILE),
    )  # fmt: skip
    apply = prepared(
        kernels.apply_forward, grid, (x, FLOATS, z),
        (rows, channels, x_stride, rows_per_block, slope, act, uses_tanh(dtype), *tile), NUM_WARPS,
    )  # fmt: skip
    return _Plan(sum_up, finish, apply, channels, SAVED_ROWS * channels, 2 * blocks * channels, 0)


def _plan_backward(
    shape: torch.Size,
    x_stride: int,
    dtype: torch.dtype,
    is_aligned: bool,
    gradient_dtype: torch.dtype,
    is_gradient_aligned: bool,
    stride: int,
    act: int,
    slope: float,
) -> _Plan:
    from flatout.yolo.model import fused_kernels as kernels

    rows, channels, blocks, rows_per_block, tile, grid, finish_grid = _tile_rows(shape)
    # The gradient of an aligned slice is an aligned slice.
    x, dx, dz = Pointer(dtype, is_aligned), Pointer(dtype, is_aligned), Pointer(gradient_dtype, is_gradient_aligned)
    act_and_tile = (slope, act, uses_tanh(dtype), *tile)
    sum_up = prepared(
        kernels.sum_gradients, grid, (x, dz, FLOATS, FLOATS),
        (rows, channels, blocks, x_stride, stride, rows_per_block, *act_and_tile), NUM_WARPS,
    )  # fmt: skip
    finish = prepared(kernels.finish_backward, finish_grid, (FLOATS,) * 5, (rows, channels, blocks, *FINISH_TILE))
    apply = prepared(
        kernels.apply_backward, grid, (x, dz, FLOATS, FLOATS, dx),
        (rows, channels, x_stride, stride, rows_per_block, *act_and_tile), NUM_WARPS,
    )  # fmt: skip
    num_factors = ceil_div(2 * channels, ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return _Plan(sum_up, finish, apply, channels, 0, num_factors + 2 * blocks * channels, 4 * num_factors)


class _TracedNormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        z, saved = torch.ops.flatout.norm_act_forward(x, *rest)
        ctx.save_for_backward(x, saved)
        ctx.act, ctx.slope = rest[-2:]
        result: Tensor = z
        return result

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        gradients = torch.ops.flatout.norm_act_backward(dz, *ctx.saved_tensors, ctx.act, ctx.slope)
        return (*gradients, *NO_GRADIENTS)


def _norm_act_results(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(SAVED_ROWS * x.shape[1], dtype=torch.float32)


def _norm_act_gradients(dz: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    per_channel = x.new_empty(x.shape[1], dtype=torch.float32)
    return torch.empty_like(x), per_channel, torch.empty_like(per_channel)


FORWARD_ARGUMENTS = (
    "(Tensor x, Tensor weight, Tensor bias, Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) counter, "
    "float momentum, float eps, int act, float slope)"
)
register(
    {f"norm_act{FORWARD_ARGUMENTS} -> Tensor": _TracedNormAct.apply},
    {
        f"norm_act_forward{FORWARD_ARGUMENTS} -> (Tensor, Tensor)": (norm_act_forward, _norm_act_results),
        "norm_act_backward(Tensor dz, Tensor x, Tensor saved, int act, float slope) -> (Tensor, Tensor, Tensor)": (
            norm_act_backward, _norm_act_gradients,
        ),
    },
)  # fmt: skip
