"""The deblurring job, as the loop of flatout.engine sees it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from flatout.engine.graphs import Filling
from flatout.engine.job import EpochReport
from flatout.feed.device import DeviceBatch
from flatout.profiler import clock
from flatout.spike.device_clip import ToClip, pictures
from flatout.spike.loss import DeblurLoss
from flatout.spike.train.epoch_end import EpochEnd

FIELDS = ("blur", "sharp", "spikes", "spike_frames")


class DeblurJob:
    """Sharp frames from blurry ones and their spikes."""

    item_names = DeblurLoss.names
    fillings: Mapping[str, Filling] = {}

    def __init__(self, to_clip: ToClip, loss: DeblurLoss, epoch_end: EpochEnd, *, share: float) -> None:
        """`share`: of a micro-batch of one rank in an optimizer step."""
        self._to_clip, self._loss, self._epoch_end, self._share = to_clip, loss, epoch_end, share

    def phase(self, epoch: int) -> object:
        return None

    def inputs(self, batch: DeviceBatch, epoch: int, step: int) -> dict[str, Tensor]:
        return {name: batch[name] for name in FIELDS}

    def step(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with clock.stage("train.forward"):
            predicted = network(self._to_clip(inputs))
        with clock.stage("train.loss"):
            items = self._loss(predicted, pictures(inputs["sharp"]))
        return items[0] * self._share, items

    def end_epoch(self, epoch: int, report: EpochReport) -> bool:
        return self._epoch_end(epoch, report)

    def sections(self) -> dict[str, dict[str, object]]:
        return self._epoch_end.sections()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch_end.load_state_dict(state)

    def flush(self) -> None:
        self._epoch_end.flush()
