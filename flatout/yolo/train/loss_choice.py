"""Which loss does a step use? OTA or plain, of one head, with auxiliary ones, or of several; it may change with the
epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flatout.yolo.assign.matches import Anchors
from flatout.yolo.loss import LossParts, aux_ota_loss, ota_loss, ota_router_loss, plain_loss, plain_router_loss
from flatout.yolo.loss.config import LossConfig
from flatout.yolo.model.heads import Detect, IAuxDetect
from flatout.yolo.model.multihead import MultiHeadDetect


@dataclass(frozen=True)
class DetectionLoss:
    """The loss of a network's raw outputs."""

    head: Detect
    config: LossConfig
    """With gains scaled to the network."""
    ota: bool
    ota_from: int = 0
    """First epoch of OTA."""

    @property
    def anchors(self) -> Anchors:
        return Anchors(self.head.anchors, tuple(self.head.strides))

    def kind(self, epoch: int) -> str:
        """ "aux", "ota" or "plain": what a step of this epoch computes."""
        if isinstance(self.head, IAuxDetect):
            return "aux"
        return "ota" if self.ota and epoch >= self.ota_from else "plain"

    def __call__(self, kind: str, maps: Sequence[Tensor], targets_T6: Tensor) -> LossParts:
        if isinstance(self.head, MultiHeadDetect):
            router = ota_router_loss if kind == "ota" else plain_router_loss
            return router(maps, targets_T6, self.anchors, self.config, self.head.groups)
        if kind == "aux":
            num = self.head.nl
            return aux_ota_loss(maps[:num], maps[num:], targets_T6, self.anchors, self.config)
        return (ota_loss if kind == "ota" else plain_loss)(maps, targets_T6, self.anchors, self.config)

    def validation(self, maps: Sequence[Tensor], targets_T6: Tensor) -> LossParts:
        """The plain loss of the lead outputs, whatever training uses, so that runs can be compared."""
        if isinstance(self.head, MultiHeadDetect):
            return self("plain", maps, targets_T6)
        return plain_loss(maps[: self.head.nl], targets_T6, self.anchors, self.config)
