"""The defect job, as the loop of flatout.engine sees it.

Dimension key:  B samples   P patch side
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.defect.loss import focal_loss
from flatout.defect.schedule import focal_gamma
from flatout.defect.strips.canonical import TOP
from flatout.defect.train.epoch_end import EpochEnd
from flatout.engine.graphs import Filling
from flatout.engine.job import EpochReport
from flatout.feed.device import DeviceBatch
from flatout.profiler import clock


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
    fillings: Mapping[str, Filling] = {}

    def __init__(self, config: StepConfig, epoch_end: EpochEnd) -> None:
        self._config, self._epoch_end = config, epoch_end
        self._gamma = config.gamma_start

    def phase(self, epoch: int) -> object:
        """The loss is another one in every epoch if gamma moves, so a captured graph is then of no use any more."""
        config = self._config
        self._gamma = focal_gamma(config.gamma_start, config.gamma_end, epoch, config.epochs)
        return self._gamma

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        self._epoch_end.keep_examples(epoch, step, batch["images"], batch["masks"])
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

    def end_epoch(self, epoch: int, report: EpochReport) -> bool:
        return self._epoch_end(epoch, report)

    def sections(self) -> dict[str, dict[str, object]]:
        return self._epoch_end.sections()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch_end.load_state_dict(state)

    def flush(self) -> None:
        self._epoch_end.flush()
