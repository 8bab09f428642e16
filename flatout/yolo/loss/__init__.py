"""What a detection costs: YOLOv7's losses, batched, without a host-device wait."""

from flatout.yolo.loss.config import LossConfig
from flatout.yolo.loss.head import head_loss
from flatout.yolo.loss.losses import aux_ota_loss, ota_loss, plain_loss
from flatout.yolo.loss.parts import LossParts, rebalance, sum_parts
from flatout.yolo.loss.router import ota_router_loss, plain_router_loss

__all__ = [
    "LossConfig",
    "LossParts",
    "aux_ota_loss",
    "head_loss",
    "ota_loss",
    "ota_router_loss",
    "plain_loss",
    "plain_router_loss",
    "rebalance",
    "sum_parts",
]
