"""One training step: network and focal loss; learning rate and focal gamma by epoch.

Dimension key:  B samples   H W patch
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatout.clock import clock
from flatout.defect.data.items import MAX_GREY
from flatout.engine import Padding, StepSettings
from flatout.feed import DeviceBatch

# Learning rate and focal gamma by epoch. They are pure functions, so no state of them is saved.

DROPS = (0.8, 0.9)
"""Fractions of the epochs after which the learning rate is reduced."""
DROP = 0.2
"""Factor of each reduction."""
SHORT_EPOCHS = 2
"""Trainings of up to this many epochs keep the learning rate: both reductions would come at once, after at most one
epoch, and the only epoch of a trial would be trained with a twenty-fifth of the rate."""


def learning_rate(lr: float, epoch: int, epochs: int) -> float:
    """`lr`, reduced to a fifth from epoch int(0.8 epochs) on, and to a fifth of that from int(0.9 epochs) on."""
    if epochs <= SHORT_EPOCHS:
        return lr
    return lr * DROP ** sum(epoch >= int(share * epochs) for share in DROPS)


def focal_gamma(start: float, end: float, epoch: int, epochs: int) -> float:
    """Half-cosine from `start` towards `end`, which would be reached one epoch after the last."""
    return start + (end - start) * (1 - math.cos(math.pi * epoch / epochs)) / 2


def step_settings(lr: float, epochs: int, epoch: int, step: int) -> StepSettings:
    """Settings of a step for one parameter group; the optimizer steps after every batch."""
    return StepSettings((learning_rate(lr, epoch, epochs),), None, step_optimizer=True)


# The focal loss over pixels, in which easy pixels, which are nearly all, count for little.
#
#     p  probability of the true class,  q = p (1 - 2 s) + 2 s,  loss = mean of -weight (1 - q)^gamma ln q

SMOOTH = 1e-5
"""s in the formula."""
_MIN_BASE = 1e-12
"""Lower bound of 1 - q: rounding may make it negative, whose power is NaN for a fractional gamma; at 0 the gradient is
not finite."""


def focal_loss(
    logit_B2HW: Tensor, mask_B1HW: Tensor, *, gamma: float, weight_background: float = 1.0, weight_defect: float = 1.0
) -> Tensor:
    """Mean focal loss, a scalar, computed in float32 unless the logits are float64. `mask` is 1 on defects, any dtype.

    The scalar alpha of older trainers corresponds to the weights alpha for background and 1 - alpha for defects.
    """
    logit_B2HW = logit_B2HW if logit_B2HW.dtype == torch.float64 else logit_B2HW.float()
    is_defect_BHW = mask_B1HW[:, 0] > 0
    margin_BHW = logit_B2HW[:, 1] - logit_B2HW[:, 0]
    # A softmax over two classes is the sigmoid of their difference.
    p_BHW = torch.sigmoid(torch.where(is_defect_BHW, margin_BHW, -margin_BHW))
    q_BHW = p_BHW * (1 - 2 * SMOOTH) + 2 * SMOOTH
    loss_BHW = -((1 - q_BHW).clamp(min=_MIN_BASE) ** gamma) * torch.log(q_BHW)
    if weight_background != 1 or weight_defect != 1:
        loss_BHW = loss_BHW * torch.where(is_defect_BHW, weight_defect, weight_background)
    return loss_BHW.mean()


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Settings of the loss and of the network's input."""

    epochs: int
    gamma_start: float = 2.0
    gamma_end: float = 2.0
    alpha_background: float = 1.0
    alpha_defect: float = 1.0
    channels_last: bool = True


class DefectJob:
    """Classifies the pixels of patches as background or defect."""

    item_names = ("loss",)
    paddings: Mapping[str, Padding] = {}

    def __init__(
        self, config: StepConfig, on_batch: Callable[[int, int, DeviceBatch], None] = lambda *args: None
    ) -> None:
        """`on_batch` is called with epoch, step and batch before every step."""
        self._config, self._on_batch = config, on_batch
        self._gamma = config.gamma_start

    def phase(self, epoch: int) -> object:
        """The gamma of the epoch: the loss changes with it, so a captured CUDA graph is only valid for one value."""
        config = self._config
        self._gamma = focal_gamma(config.gamma_start, config.gamma_end, epoch, config.epochs)
        return self._gamma

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        self._on_batch(epoch, step, batch)
        return {"images": batch["images"], "masks": batch["masks"]}

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with clock.stage("train.forward"):
            x = inputs["images"] / MAX_GREY
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
