"""The loss of a network with several heads, in one assignment and one pass over the maps.

Every head learns from the targets of its own classes only; objects of other classes are background for it. A head
without targets still has an objectness loss. The losses of the heads are summed by weight, not averaged.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from flatout.yolo.loss.losses import LossConfig, LossParts, assign_all, assign_ota, head_loss, route_all
from flatout.yolo.loss.matches import Anchors, Matches, Search
from flatout.yolo.multihead.head_config import HeadConfig
from flatout.yolo.multihead.joined_maps import Heads, heads_on

Assign = Callable[[Sequence[Tensor], Tensor, Anchors, Search, Heads | None], Matches]
"""`assign_all` or `assign_ota`."""


def router_loss(
    assign: Assign,
    joined: Sequence[Tensor],
    targets_T6: Tensor,
    anchors: Anchors,
    config: LossConfig,
    groups: HeadConfig,
    balance_L: Tensor | None = None,
) -> LossParts:
    """The loss of all heads, from the joined maps of MultiHeadDetect; `targets_T6` has the data set's classes."""
    heads = heads_on(groups, joined[0].device)
    routed_T6 = route_all(joined, targets_T6, heads)
    matches = assign(joined, routed_T6, anchors, Search(anchor_t=config.anchor_t), heads)
    return head_loss(joined, routed_T6, matches, anchors, config, balance_L, heads=heads)


plain_router_loss = partial(router_loss, assign_all)
"""`plain_loss` of all heads."""
ota_router_loss = partial(router_loss, assign_ota)
"""`ota_loss` of all heads: targets compete for cells only with targets of their own head."""
