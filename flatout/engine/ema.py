"""The moving average of a network's weights: what is evaluated, and what a training leaves behind."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn


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
