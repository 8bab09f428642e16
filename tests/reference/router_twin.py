"""Reference implementation (twin) of the loss router: one head after the other.

Dimension key:  T targets   R targets of a head
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.loss.losses import LossConfig
from flatout.yolo.loss.matches import Anchors
from flatout.yolo.multihead.head_config import HeadConfig
from tests.reference.ota_twin import twin_assign, twin_loss


class HeadTwin(NamedTuple):
    """Matches and loss of one head, without its weight."""

    lists: list[Tensor]
    """Matches per layer, with targets numbered as in the whole batch."""
    total: Tensor
    items: Tensor


def twin_head(
    maps: Sequence[Tensor],
    targets_T6: Tensor,
    anchors: Anchors,
    config: LossConfig,
    groups: HeadConfig,
    head: int,
    *,
    ota: bool,
) -> HeadTwin:
    """One head alone, without targets and class outputs of other heads."""
    classes = list(groups.heads[head].classes)
    row_R = torch.tensor([row for row, target in enumerate(targets_T6.tolist()) if int(target[1]) in classes]).long()
    local_R6 = targets_T6[row_R].clone()
    local_R6[:, 1] = torch.tensor([float(classes.index(int(each))) for each in local_R6[:, 1]])
    if groups.full_head:
        maps = [one_map[..., [0, 1, 2, 3, 4, *(5 + class_id for class_id in classes)]] for one_map in maps]
    twin = twin_assign(maps, local_R6, *anchors, anchor_t=config.anchor_t, ota=ota)
    total, items = twin_loss(maps, local_R6, twin.lists, anchors.size_LA2, config)
    lists = [torch.cat((each[:, :4], row_R[each[:, 4:]]), 1) for each in twin.lists]
    return HeadTwin(lists, total, items)


def twin_router_loss(
    maps_by_head: Sequence[Sequence[Tensor]],
    targets_T6: Tensor,
    anchors: Anchors,
    config: LossConfig,
    groups: HeadConfig,
    *,
    ota: bool,
) -> tuple[Tensor, Tensor]:
    """Loss and items of all heads, summed by weight."""
    heads = [
        twin_head(maps, targets_T6, anchors, config, groups, head, ota=ota) for head, maps in enumerate(maps_by_head)
    ]
    weighted = list(zip(groups.weight_H, heads, strict=True))
    total = torch.stack([weight * head.total for weight, head in weighted]).sum()
    return total, torch.stack([weight * head.items for weight, head in weighted]).sum(0)
