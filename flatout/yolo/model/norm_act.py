"""Batch norm and activation in one go while training on a GPU; torch's own modules everywhere else.

torch passes over a map 13 times for this pair, forward and backward; the kernels here pass over it 8 times
(bench/model_step.py says what that is worth). They want channels_last maps and one of the ACTS; what they cannot do
goes through torch, with the same result.

The kernels are reached by two doors: an autograd function, which costs the host least, and operators for
torch.compile.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flatout.yolo.model.map_layout import suits_kernels
from flatout.yolo.model.norm_act_launches import SAVED_ROWS, backward, forward

ACTS = {nn.Identity: 0, nn.SiLU: 1, nn.LeakyReLU: 2, nn.ReLU: 2}
"""Activation -> its number in norm_act_kernels.py; ReLU is a LeakyReLU of slope 0."""


def norm_act(x: Tensor, norm: nn.BatchNorm2d | nn.SyncBatchNorm, act: nn.Module) -> Tensor:
    """act(norm(x)); in training also moves the running statistics, as `norm` does."""
    if not _suits(x, norm, act):
        y: Tensor = act(norm(x))
        return y
    fused = torch.ops.flatout.norm_act if torch.compiler.is_compiling() else _apply
    z: Tensor = fused(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked,
        norm.momentum, norm.eps, ACTS[type(act)], float(getattr(act, "negative_slope", 0.0)),
    )  # fmt: skip
    return z


def _suits(x: Tensor, norm: nn.BatchNorm2d | nn.SyncBatchNorm, act: nn.Module) -> bool:
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


class _NormAct(torch.autograd.Function):
    """The door for eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        z, saved = forward(x, *rest)
        ctx.save_for_backward(x, saved)
        ctx.act, ctx.slope = rest[-2:]
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return _backward_once(ctx, dz)
        x, saved = ctx.saved_tensors
        return (*backward(dz, x, saved, ctx.act, ctx.slope), *NO_GRADIENTS)


@torch.autograd.function.once_differentiable
def _backward_once(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
    """Under create_graph=True: its results refuse to be differentiated. Kept apart, as the guard costs the host."""
    x, saved = ctx.saved_tensors
    return (*backward(dz, x, saved, ctx.act, ctx.slope), *NO_GRADIENTS)


NO_GRADIENTS = (None,) * 7
"""Of the running statistics and the numbers."""

# Without the look at functorch's transforms that Function.apply takes first and that costs a third of the call: they
# could not see our launches, and end in an error either way.
_apply = super(torch.autograd.Function, _NormAct).apply


# The door for torch.compile: operators that it does not look into. If it did, it would compile each of the several
# hundred launches of a network anew, for minutes.
#
# `norm_act` is not in what it compiles: it is a composite of an autograd function around the two others, which know no
# derivative. That way a layer costs the host least when it runs; what other ways cost is in
# bench/results/model_step_ideas_h200_202611.md.


class _Traced(torch.autograd.Function):
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


FORWARD_ARGUMENTS = (
    "(Tensor x, Tensor weight, Tensor bias, Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) counter, "
    "float momentum, float eps, int act, float slope)"
)
_library = torch.library.Library("flatout", "FRAGMENT")
_library.define(f"norm_act{FORWARD_ARGUMENTS} -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(f"norm_act_forward{FORWARD_ARGUMENTS} -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    "norm_act_backward(Tensor dz, Tensor x, Tensor saved, int act, float slope) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("norm_act", _Traced.apply, "CompositeImplicitAutograd")
_library.impl("norm_act_forward", forward, "CUDA")
_library.impl("norm_act_backward", backward, "CUDA")


@torch.library.register_fake("flatout::norm_act_forward", lib=_library)
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(SAVED_ROWS * x.shape[1], dtype=torch.float32)


@torch.library.register_fake("flatout::norm_act_backward", lib=_library)
def _(dz: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_channels = x.new_empty(x.shape[1], dtype=torch.float32)
    return torch.empty_like(x), of_channels, torch.empty_like(of_channels)
