"""Optimizers whose step can be skipped on the device, and the moving average of a network's weights."""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from flatout.engine.job import StepSettings
from flatout.errors import ConfigError

Kind = Literal["sgd", "adam"]


# torch's optimizers import its compiler, torch._dynamo, when they are created, because most of their methods are
# wrapped for it. A training that compiles nothing should not have to wait for that, which takes longer than to import
# torch (bench/fixed_costs.py). Here the methods are used without their wrappers; they compute the same.


class _Unwrapped(torch.optim.Optimizer):
    """An optimizer that nothing compiles."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class Sgd(_Unwrapped, torch.optim.SGD):
    """torch's SGD."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class Adam(_Unwrapped, torch.optim.Adam):
    """torch's Adam."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(_Unwrapped, torch.optim.AdamW):
    """torch's AdamW."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def make_optimizer(
    kind: Kind, groups: Sequence[Sequence[nn.Parameter]], *, lr: float, momentum: float, decays: Sequence[float]
) -> torch.optim.Optimizer:
    """Nesterov SGD, or Adam with betas (momentum, 0.999) and coupled decay; fused, one group per entry of `decays`.

    Groups without parameters are left out.
    """
    if kind not in get_args(Kind):
        raise ConfigError(f"optimizer {kind!r} is unknown: use {' or '.join(map(repr, get_args(Kind)))}.")
    param_groups = [
        {"params": list(group), "weight_decay": decay} for group, decay in zip(groups, decays, strict=True) if group
    ]
    if kind == "adam":
        return Adam(param_groups, lr=lr, betas=(momentum, 0.999), fused=True)
    optimizer = Sgd(param_groups, lr=lr, momentum=momentum, nesterov=True, fused=True)
    # torch allocates these uninitialized at the first step; if that step were skipped, they would stay garbage.
    for parameter in parameters_of(optimizer):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state_dict, also one of parameters with another memory layout.

    Fused kernels walk through parameter and state in memory order: on a CPU, a state in another layout would silently
    update the wrong weights. A run may move from a GPU with channels_last to one without.
    """
    optimizer.load_state_dict(saved)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def apply_settings(optimizer: torch.optim.Optimizer, settings: StepSettings) -> None:
    """Set learning rates and momentum, which are plain numbers on the host."""
    for group, lr in zip(optimizer.param_groups, settings.lrs, strict=True):
        group["lr"] = lr
        if settings.momentum is not None and "momentum" in group:
            group["momentum"] = settings.momentum


def step_unless(optimizer: torch.optim.Optimizer, found_bad: Tensor) -> None:
    """Step the optimizer unless `found_bad` is 1. The kernel checks this, so the host does not wait."""
    optimizer.found_inf = found_bad  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()


# The moving average of a network's weights, which is validated and saved


def decay_at(update: int, *, decay: float = 0.9999, ramp: float = 2000) -> float:
    """Share of the average that update number `update` (from 1) keeps: small at first, while weights change fast."""
    return decay * (1 - math.exp(-update / ramp))


class MovingAverage:
    """An exponential moving average (EMA) of a network's floating-point state.

    Parameters, batch-norm statistics and anchors are all averaged; integer buffers keep their initial
    values. An update takes a few kernel launches and does not wait for the device.
    """

    def __init__(self, network: nn.Module, *, decay: float = 0.9999, ramp: float = 2000) -> None:
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        self.updates = 0
        self._decay = decay
        self._ramp = ramp
        self._own = _floating(self.network)
        self._source = _floating(network)

    @torch.no_grad()
    def update(self) -> None:
        """Average in the weights after an optimizer step."""
        self.updates += 1
        share = 1 - decay_at(self.updates, decay=self._decay, ramp=self._ramp)
        torch._foreach_lerp_(self._own, self._source, share)

    def state_dict(self) -> dict[str, Any]:
        return {"ema": self.network.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state["ema"])
        self.updates = int(state["updates"])


def _floating(network: nn.Module) -> list[Tensor]:
    """The tensors themselves, not copies: valid as long as the network's tensors are only changed in place."""
    return [tensor for tensor in network.state_dict(keep_vars=True).values() if tensor.is_floating_point()]
