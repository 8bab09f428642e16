"""What a detection costs: YOLOv7's losses, batched, without a host-device wait."""

from flatout.yolo.loss.config import LossConfig
from flatout.yolo.loss.head import head_loss
from flatout.yolo.loss.losses import aux_ota_loss, ota_loss, plain_loss
from flatout.yolo.loss.parts import LossParts, rebalance, sum_parts

__all__ = [
    "LossConfig",
    "LossParts",
    "aux_ota_loss",
    "head_loss",
    "ota_loss",
    "plain_loss",
    "rebalance",
    "sum_parts",
]
