"""A plain reference of YOLOv7's training iterations, for flatout/engine/loop.py with the detection step.

Loops over images and parameters, nothing fused; learning rate, momentum and accumulation follow from the definition of
the warm-up.
"""

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.hyp import Hyp
from flatout.yolo.loss import LossConfig
from flatout.yolo.model.network import Network
from tests.reference.ota_twin import twin_assign, twin_loss


class Iteration(NamedTuple):
    """The batch of one iteration."""

    images: Tensor
    """uint8 [B, 3, H, W]."""
    targets_T6: Tensor


class PlainTraining:
    """Trains a copy of a network; epoch 0 only, within the warm-up."""

    def __init__(self, network: Network, hyp: Hyp, loss: LossConfig, *, total_batch: int, num_warmup: int) -> None:
        self.network = copy.deepcopy(network).train()
        self.average = copy.deepcopy(network)
        self._hyp, self._loss = hyp, loss
        self._total_batch, self._num_warmup = total_batch, num_warmup
        self._momenta: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._iteration = self._updates = 0

    def train(self, iteration: Iteration) -> Tensor:
        """One iteration; returns box, obj, cls and their sum."""
        head = self.network.head
        maps = self.network(iteration.images.float() / 255)
        matched = twin_assign(maps, iteration.targets_T6, head.anchors, head.strides, ota=self._hyp.ota)
        loss, items = twin_loss(maps, iteration.targets_T6, matched.lists, head.anchors, self._loss)
        names, parameters = zip(*self.network.named_parameters(), strict=True)
        for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            self._gradients[name] = self._gradients.get(name, torch.zeros_like(gradient)) + gradient
        progress = min(1.0, self._iteration / self._num_warmup)
        accumulate = max(1, round(1 + (64 / self._total_batch - 1) * progress))
        if self._iteration % accumulate == 0:
            self._step(progress, dict(zip(names, parameters, strict=True)))
        self._iteration += 1
        return items

    @torch.no_grad()
    def _step(self, progress: float, parameters: dict[str, Tensor]) -> None:
        hyp = self._hyp
        momentum = hyp.warmup_momentum + (hyp.momentum - hyp.warmup_momentum) * progress
        decay = hyp.weight_decay * self._total_batch * max(round(64 / self._total_batch), 1) / 64
        norms = {name for name, module in self.network.named_modules() if isinstance(module, torch.nn.BatchNorm2d)}
        for name, parameter in parameters.items():
            owner, _, kind = name.rpartition(".")
            start = hyp.warmup_bias_lr if kind == "bias" else 0.0
            lr = start + (hyp.lr0 - start) * progress
            decays = kind == "weight" and owner not in norms
            gradient = self._gradients[name] + (decay * parameter if decays else 0)
            self._momenta[name] = momentum * self._momenta.get(name, torch.zeros_like(gradient)) + gradient
            parameter -= lr * (gradient + momentum * self._momenta[name])
        self._gradients.clear()
        self._updates += 1
        ema_decay = 0.9999 * (1 - math.exp(-self._updates / 2000))
        own = self.network.state_dict()
        for name, value in self.average.state_dict().items():
            if value.is_floating_point():
                value.copy_(ema_decay * value + (1 - ema_decay) * own[name])


def states_of(training: PlainTraining) -> Sequence[dict[str, Tensor]]:
    """State dicts of the weights and of their moving average."""
    return training.network.state_dict(), training.average.state_dict()
