"""YOLOv7's three losses (plain, OTA, OTA with auxiliary heads), and the assignment behind them.

All take `maps`, one raw prediction map [images, anchors, rows, columns, 5 + classes] per layer (channels x, y, w, h,
objectness, classes; any float dtype, float32 inside), and `targets_T6` with one row per box: image, class, and the
centre and size of the box relative to the image's. Rows need no order; rows whose image is negative are padding.

On a GPU nothing here makes the host wait, and no shape depends on the data but T. To capture a step in a CUDA graph,
or to compile it once, pad `targets_T6` to a fixed T and call it once before (that compiles the kernels).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.clock import clock
from flatout.yolo.loss.kernel_support import constants, kernels_ready
from flatout.yolo.loss.matches import Anchors, Matches, Search, check_maps
from flatout.yolo.loss.ota import list_candidates, torch_assign_ota
from flatout.yolo.loss.terms import LossConfig, LossParts, default_balance, sum_parts, torch_head_loss
from flatout.yolo.multihead.joined_maps import Heads, as_images, route

# Assignment where the maps are: by kernels on a GPU, by torch operations elsewhere. The same matches either way.
#
# With `heads` the maps are the joined ones of several heads, and the targets are routed (heads.py).
#
# Inside a compiled step these run as they are, between two compiled pieces: there is nothing left to fuse.


@torch.compiler.disable
@torch.no_grad()
def route_all(maps: Sequence[Tensor], targets_T6: Tensor, heads: Heads) -> Tensor:
    """Targets as the heads see them (`heads.route`)."""
    if kernels_ready(maps):
        from flatout.yolo.loss.on_device import route_on_device  # imports Triton

        with torch.cuda.device(maps[0].device):
            return route_on_device(targets_T6, heads)
    return route(targets_T6, heads)


@torch.compiler.disable
@torch.no_grad()
def assign_all(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, search: Search, heads: Heads | None = None
) -> Matches:
    """Every candidate cell is matched with the target that brought it."""
    check_maps(maps, anchors, joined=heads is not None)
    if kernels_ready(maps):
        from flatout.yolo.loss.on_device import list_on_device  # imports Triton

        with torch.cuda.device(maps[0].device):
            return list_on_device(maps, targets_T6, anchors, search, heads)
    return list_candidates(as_images(maps, heads, anchors), targets_T6, anchors, search)


@torch.compiler.disable
@torch.no_grad()
def assign_ota(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, search: Search, heads: Heads | None = None
) -> Matches:
    """Candidates are dealt out among the targets of an image by cost (ota.py says how)."""
    check_maps(maps, anchors, joined=heads is not None)
    if kernels_ready(maps):
        from flatout.yolo.loss.on_device import ota_on_device  # imports Triton

        with torch.cuda.device(maps[0].device):
            return ota_on_device(maps, targets_T6, anchors, search, heads)
    with torch.autocast(maps[0].device.type, enabled=False):
        own_HP = None if heads is None else heads.own_HP
        return torch_assign_ota(as_images(maps, heads, anchors), targets_T6, anchors, search, own_HP)


# The loss of one head, given who matches whom: the piece every detection loss is made of.


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


AUX_WEIGHT = 0.25
AUX_TOP = 20


def plain_loss(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, config: LossConfig, balance_L: Tensor | None = None
) -> LossParts:
    """Every candidate cell predicts the target that brought it."""
    with clock.stage("assign"):
        matches = assign_all(maps, targets_T6, anchors, Search(anchor_t=config.anchor_t))
    parts: LossParts = head_loss(maps, targets_T6, matches, anchors, config, balance_L)
    return parts


def ota_loss(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, config: LossConfig, balance_L: Tensor | None = None
) -> LossParts:
    """Candidates are dealt out among the targets of an image by what the network predicts there."""
    with clock.stage("assign"):
        matches = assign_ota(maps, targets_T6, anchors, Search(anchor_t=config.anchor_t))
    parts: LossParts = head_loss(maps, targets_T6, matches, anchors, config, balance_L)
    return parts


def aux_ota_loss(
    lead_maps: Sequence[Tensor],
    aux_maps: Sequence[Tensor],
    targets_T6: Tensor,
    anchors: Anchors,
    config: LossConfig,
    balance_L: Tensor | None = None,
) -> LossParts:
    """OTA for a lead head and its auxiliary head, which learns from a wider choice of the lead's predictions."""
    heads = (
        (lead_maps, Search(config.anchor_t, 0.5, AUX_TOP), 1.0),
        (aux_maps, Search(config.anchor_t, 1.0, AUX_TOP), AUX_WEIGHT),
    )
    parts = []
    for maps, search, weight in heads:
        with clock.stage("assign"):
            matches = assign_ota(lead_maps, targets_T6, anchors, search)
        parts.append(head_loss(maps, targets_T6, matches, anchors, config, balance_L, weight))
    return sum_parts(parts)
