"""Detection losses: YOLOv7's losses and their assignment of targets, batched, without making the host wait.

Files:

    kernel_support  Checks whether the GPU kernels of the loss can be used
    kernels_assign  GPU kernels of the assignment: list the candidates of every image, read the predictions there
    kernels_loss    GPU kernels of the loss, forward and backward: terms of the matched cells, objectness of all cells
    kernels_math    Functions used by the GPU kernels: loss functions with their derivatives
    losses          YOLOv7's three losses: plain, OTA, and OTA with auxiliary heads
    matches         The result of an assignment: which cell of which prediction map must predict which target
    on_device       Assignment and loss by GPU kernels, without making the host wait and without copying a map
    ota             OTA assignment by torch operations: each target takes its cheapest cells, for a whole batch at once
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
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
    from flatout.yolo.loss.matches import Anchors, Matches, Search
    from flatout.yolo.multihead.router import ota_router_loss, plain_router_loss

__getattr__, __dir__ = face(__name__)
