"""What a step of the defect job computes: patches in, focal loss out; and its rates by epoch.

Dimension key:  B samples   P patch side
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatout.clock import clock
from flatout.defect.data.items import TOP
from flatout.engine import Padding, StepSettings
from flatout.feed import DeviceBatch

# Learning rate and focal gamma by epoch: pure functions, so nothing of them is saved.

DROPS = (0.8, 0.9)
"""Shares of the epochs after which the rate falls."""
DROP = 0.2


def learning_rate(lr: float, epoch: int, epochs: int) -> float:
    """A fifth from epoch int(0.8 T) on, and a fifth of that from int(0.9 T) on."""
    return lr * DROP ** sum(epoch >= int(share * epochs) for share in DROPS)


def focal_gamma(start: float, end: float, epoch: int, epochs: int) -> float:
    """From `start` towards `end` along half a wave; `end` itself would come one epoch after the last."""
    return start + (end - start) * (1 - math.cos(math.pi * epoch / epochs)) / 2


class StepwiseSchedule:
    """StepSettings for one parameter group; the optimizer steps after every batch."""

    def __init__(self, lr: float, epochs: int) -> None:
        self._lr, self._epochs = lr, epochs

    def __call__(self, epoch: int, step: int) -> StepSettings:
        return StepSettings((learning_rate(self._lr, epoch, self._epochs),), None, step_optimizer=True)


# The focal loss over pixels: easy ones, which are nearly all, count for little.
#
#     p  probability of the true class,  q = p (1 - 2 s) + 2 s,  loss = mean of -weight (1 - q)^gamma ln q
#
# Dimension key:  B samples   H W patch

SMOOTH = 1e-5
_LEAST = 1e-12
"""Rounding may put q a hair above 1, and a root of what then remains is no number, nor is its slope at zero."""


def focal_loss(
    logit_B2HW: Tensor, mask_B1HW: Tensor, *, gamma: float, weight_background: float = 1.0, weight_defect: float = 1.0
) -> Tensor:
    """Scalar; float32 inside unless the logits are float64. `mask` is 1 on defects, of any dtype.

    Classes are weighted by name. The scalar alpha of older trainings meant: background alpha, defect 1 - alpha.
    """
    logit_B2HW = logit_B2HW if logit_B2HW.dtype == torch.float64 else logit_B2HW.float()
    is_defect_BHW = mask_B1HW[:, 0] > 0
    margin_BHW = logit_B2HW[:, 1] - logit_B2HW[:, 0]
    # Softmax over two classes is a sigmoid of their difference.
    p_BHW = torch.sigmoid(torch.where(is_defect_BHW, margin_BHW, -margin_BHW))
    q_BHW = p_BHW * (1 - 2 * SMOOTH) + 2 * SMOOTH
    loss_BHW = -((1 - q_BHW).clamp(min=_LEAST) ** gamma) * torch.log(q_BHW)
    if weight_background != 1 or weight_defect != 1:
        loss_BHW = loss_BHW * torch.where(is_defect_BHW, weight_defect, weight_background)
    return loss_BHW.mean()


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How a batch becomes a loss."""

    epochs: int
    gamma_start: float = 2.0
    gamma_end: float = 2.0
    alpha_background: float = 1.0
    alpha_defect: float = 1.0
    channels_last: bool = True


class DefectJob:
    """Pixels of patches as background or defect."""

    item_names = ("loss",)
    paddings: Mapping[str, Padding] = {}

    def __init__(self, config: StepConfig, see: Callable[[int, int, DeviceBatch], None] = lambda *seen: None) -> None:
        """`see` is shown every batch: epoch, step, batch."""
        self._config, self._see = config, see
        self._gamma = config.gamma_start

    def phase(self, epoch: int) -> object:
        """The loss is another one in every epoch if gamma moves, so a captured graph is then of no use any more."""
        config = self._config
        self._gamma = focal_gamma(config.gamma_start, config.gamma_end, epoch, config.epochs)
        return self._gamma

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        self._see(epoch, step, batch)
        return {"images": batch["images"], "masks": batch["masks"]}

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with clock.stage("train.forward"):
            x = inputs["images"] / TOP
            if self._config.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            logits = network(x)
        with clock.stage("train.loss"):
            loss = focal_loss(
                logits,
                inputs["masks"],
                gamma=self._gamma,
                weight_background=self._config.alpha_background,
                weight_defect=self._config.alpha_defect,
            )
        return loss, loss.detach().reshape(1)
