"""The loss of a network with several heads, in one assignment and one pass over the maps.

Every head learns from the targets of its own classes only; objects of other classes are background for it. A head
without targets still has an objectness loss. The losses of the heads are summed by weight, not averaged.
"""

from collections.abc import Sequence

from torch import Tensor

from flatout.yolo.loss.losses import LossConfig, LossParts, assign_all, assign_ota, head_loss, route_all
from flatout.yolo.loss.matches import Anchors, Search
from flatout.yolo.multihead.head_config import HeadConfig
from flatout.yolo.multihead.joined_maps import heads_on


def plain_router_loss(
    joined: Sequence[Tensor],
    targets_T6: Tensor,
    anchors: Anchors,
    config: LossConfig,
    groups: HeadConfig,
    balance_L: Tensor | None = None,
) -> LossParts:
    """`plain_loss` of all heads, from the joined maps of MultiHeadDetect; `targets_T6` has the data set's classes."""
    return _router_loss(joined, targets_T6, anchors, config, groups, balance_L, ota=False)


def ota_router_loss(
    joined: Sequence[Tensor],
    targets_T6: Tensor,
    anchors: Anchors,
    config: LossConfig,
    groups: HeadConfig,
    balance_L: Tensor | None = None,
) -> LossParts:
    """`ota_loss` of all heads: targets compete for cells only with targets of their own head."""
    return _router_loss(joined, targets_T6, anchors, config, groups, balance_L, ota=True)


def _router_loss(
    joined: Sequence[Tensor],
    targets_T6: Tensor,
    anchors: Anchors,
    config: LossConfig,
    groups: HeadConfig,
    balance_L: Tensor | None,
    *,
    ota: bool,
) -> LossParts:
    heads = heads_on(groups, joined[0].device)
    routed_T6 = route_all(joined, targets_T6, heads)
    assign = assign_ota if ota else assign_all
    matches = assign(joined, routed_T6, anchors, Search(anchor_t=config.anchor_t), heads)
    parts: LossParts = head_loss(joined, routed_T6, matches, anchors, config, balance_L, heads=heads)
    return parts
