"""The loss of one head, given who matches whom: the piece every detection loss is made of."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.yolo.assign.heads import Heads
from flatout.yolo.assign.joined_map import as_images
from flatout.yolo.assign.kernels_ready import kernels_ready
from flatout.yolo.assign.layer_table import constants
from flatout.yolo.assign.matches import Anchors, Matches, check_maps
from flatout.yolo.loss.config import LossConfig, default_balance
from flatout.yolo.loss.parts import LossParts
from flatout.yolo.loss.terms import torch_head_loss


@torch.compiler.disable
def head_loss(
    maps: Sequence[Tensor],
    targets_T6: Tensor,
    matches: Matches,
    anchors: Anchors,
    config: LossConfig,
    balance_L: Tensor | None = None,
    weight: float = 1.0,
    heads: Heads | None = None,
) -> LossParts:
    """Box, objectness and class loss of the maps of one head, times `weight`; of several at once with `heads`.

    Box and class loss: mean over a layer's matches, summed over the layers. Objectness: mean over a layer's cells,
    summed with `balance_L` (float32 [L]; by default YOLOv7's). Heads with maps of their own: one call each, and
    `sum_parts`. A head that knows only some classes gets targets with its own class numbers, the others marked as
    padding. With `heads` the maps are joined, and the images of `targets_T6` are heads of pictures (assign/heads.py).
    """
    check_maps(maps, anchors, joined=heads is not None)
    if balance_L is None:
        balance_L = constants(default_balance(len(maps)), maps[0].device)
    if matches.spans is not None and kernels_ready(maps):
        from flatout.yolo.loss.on_device import device_head_loss  # imports Triton

        with torch.cuda.device(maps[0].device):
            return device_head_loss(maps, targets_T6, matches, anchors, config, balance_L, weight, heads)
    with torch.autocast(maps[0].device.type, enabled=False):
        return torch_head_loss(
            as_images(maps, heads, anchors), targets_T6, matches, anchors, config, balance_L, weight, heads
        )
