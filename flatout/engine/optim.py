"""Optimizers whose step can be left out on the device, and the moving average of a network's weights."""

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flatout.engine.job import StepSettings

Kind = Literal["sgd", "adam"]


def make_optimizer(
    kind: Kind, groups: Sequence[Sequence[nn.Parameter]], *, lr: float, momentum: float, decays: Sequence[float]
) -> torch.optim.Optimizer:
    """Nesterov SGD, or Adam with betas (momentum, 0.999) and coupled decay; fused, one group per entry of `decays`."""
    described = [
        {"params": list(group), "weight_decay": decay} for group, decay in zip(groups, decays, strict=True) if group
    ]
    if kind == "adam":
        return torch.optim.Adam(described, lr=lr, betas=(momentum, 0.999), fused=True)
    optimizer = torch.optim.SGD(described, lr=lr, momentum=momentum, nesterov=True, fused=True)
    # torch makes these at the first step without filling them; were that step left out, garbage would remain.
    for parameter in parameters_of(optimizer):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Continue from a state_dict, also one of parameters with another memory layout.

    Fused kernels walk through parameter and state side by side, as they lie in memory: on a CPU a state in another
    layout would move the wrong weights without a word. A run may go from a GPU with channels_last to one without.
    """
    optimizer.load_state_dict(saved)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def apply_knobs(optimizer: torch.optim.Optimizer, knobs: StepSettings) -> None:
    """Set learning rates and momentum; plain numbers on the host."""
    for group, lr in zip(optimizer.param_groups, knobs.lrs, strict=True):
        group["lr"] = lr
        if knobs.momentum is not None and "momentum" in group:
            group["momentum"] = knobs.momentum


def step_unless(optimizer: torch.optim.Optimizer, found_bad: Tensor) -> None:
    """An optimizer step, unless `found_bad` is 1: the kernel looks, the host does not."""
    optimizer.found_inf = found_bad  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()


# The moving average of a network's weights: what is evaluated, and what a training leaves behind.


def decay_at(update: int, *, decay: float = 0.9999, ramp: float = 2000) -> float:
    """Share of the average that the `update`-th update (from 1) keeps: little at first, when weights change fast."""
    return decay * (1 - math.exp(-update / ramp))


class MovingAverage:
    """A copy of a network whose floating-point state follows the original's; counters stay as they were copied.

    Parameters, batch-norm statistics and anchors all follow. An update is one pass over all of them, in a few kernel
    launches, and reads nothing back.
    """

    def __init__(self, network: nn.Module, *, decay: float = 0.9999, ramp: float = 2000) -> None:
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        self.updates = 0
        self._decay = decay
        self._ramp = ramp
        self._own = _floating(self.network)
        self._followed = _floating(network)

    @torch.no_grad()
    def update(self) -> None:
        """Follow the network by one optimizer step."""
        self.updates += 1
        share = 1 - decay_at(self.updates, decay=self._decay, ramp=self._ramp)
        torch._foreach_lerp_(self._own, self._followed, share)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.network.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["state"])
        self.updates = int(state["updates"])


def _floating(network: nn.Module) -> list[Tensor]:
    """The tensors themselves, not copies: the lists hold as long as a network's tensors are changed in place."""
    return [tensor for tensor in network.state_dict(keep_vars=True).values() if tensor.is_floating_point()]
