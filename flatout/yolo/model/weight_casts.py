"""Weights in the format that autocast computes in, all with one call.

Autocast copies every weight by itself when its convolution runs, and every gradient back: 210 small kernels of a step
of YOLOv7, each of which costs the host as much as a large one. The numbers are the same either way.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@contextmanager
def weights_cast(convolutions: Iterable[nn.Conv2d], device: torch.device) -> Iterator[None]:
    """In the block, under autocast, the convolutions have weights that need no cast; what they learn goes to their own.

    Ranks send gradients off while the backward pass goes on, and these would all come at its end: there, nothing is
    changed.
    """
    learning = [each for each in convolutions if each.weight.requires_grad] if _pays(device) else []
    own = [each.weight for each in learning]
    if learning:
        for each, cast in zip(learning, _CastAll.apply(torch.get_autocast_dtype(device.type), *own), strict=True):
            _set_weight(each, cast)
    try:
        yield
    finally:
        for each, weight in zip(learning, own, strict=True):
            _set_weight(each, weight)


def _set_weight(convolution: nn.Conv2d, weight: Tensor) -> None:
    # Past its setter, which takes parameters only; a cast is none, or it would be trained in their place.
    convolution._parameters["weight"] = weight  # type: ignore[assignment]


def _pays(device: torch.device) -> bool:
    # The device of shapes alone has no autocast. (torch 2.11 cannot compile a question which devices have one.)
    is_cast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    is_alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    return is_cast and torch.is_grad_enabled() and is_alone


class _CastAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = weights[0].dtype
        return tuple(_copied(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        copies = iter(_copied([each for each in gradients if each is not None], ctx.dtype))
        return (None, *(None if each is None else next(copies) for each in gradients))


def _copied(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copy = torch.ops.flatout.copied if torch.compiler.is_compiling() else _copy_all
    copies: list[Tensor] = copy(list(tensors), dtype)
    return copies


def _copy_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = _like_all(tensors, dtype)
    torch._foreach_copy_(copies, tensors)
    return copies


def _like_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(each, dtype=dtype) for each in tensors]


# An operator that torch.compile does not look into: of what it sees it makes a kernel per tensor.
_library = torch.library.Library("flatout", "FRAGMENT")
_library.define("copied(Tensor[] tensors, ScalarType dtype) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
_library.impl("copied", _copy_all, "CompositeExplicitAutograd")
torch.library.register_fake("flatout::copied", _like_all, lib=_library)
