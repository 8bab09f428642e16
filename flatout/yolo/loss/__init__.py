"""What a detection costs: YOLOv7's losses and the assignment behind them, batched, without a host-device wait.

Files:

    kernel_support  What the GPU kernels can take, and the table on the device that tells them about the maps
    kernels_assign  GPU kernels that list the candidates of every image and read what the network says there
    kernels_loss    GPU kernels of the loss: terms of the matched cells, objectness of all cells, and their sum
    kernels_math    The loss functions inside GPU kernels, with their derivatives
    losses          YOLOv7's three losses (plain, OTA, OTA with auxiliary heads), and the terms they are made of
    matches         What an assignment says: which cell of which prediction map has to predict which target
    on_device       The loss of one head by GPU kernels, forward and backward: no wait, and no copy of a map
    ota             OTA: every target takes the cells that suit it best
"""

from flatout.yolo.loss.losses import (
    LossConfig,
    LossParts,
    assign_all,
    assign_ota,
    aux_ota_loss,
    head_loss,
    ota_loss,
    plain_loss,
    rebalance,
    route_all,
    sum_parts,
)
from flatout.yolo.loss.matches import Anchors, Matches, Search, list_matches
from flatout.yolo.multihead.router import ota_router_loss, plain_router_loss

__all__ = [
    "Anchors",
    "LossConfig",
    "LossParts",
    "Matches",
    "Search",
    "assign_all",
    "assign_ota",
    "aux_ota_loss",
    "head_loss",
    "list_matches",
    "ota_loss",
    "ota_router_loss",
    "plain_loss",
    "plain_router_loss",
    "rebalance",
    "route_all",
    "sum_parts",
]
