"""YOLOv7's three losses: plain, OTA, and OTA with auxiliary heads.

All take `maps`, one raw prediction map [images, anchors, rows, columns, 5 + classes] per layer (channels x, y, w, h,
objectness, classes; any float dtype, float32 inside), and `targets_T6` with one row per box: image, class, and the
centre and size of the box relative to the image's. Rows need no order; rows whose image is negative are padding.

On a GPU nothing here makes the host wait, and no shape depends on the data but T. To capture a step in a CUDA graph,
or to compile it once, pad `targets_T6` to a fixed T and call it once before (that compiles the kernels).
"""

from collections.abc import Sequence

from torch import Tensor

from flatout.profiler import clock
from flatout.yolo.assign import assign_all, assign_ota
from flatout.yolo.assign.matches import Anchors, Search
from flatout.yolo.loss.config import LossConfig
from flatout.yolo.loss.head import head_loss
from flatout.yolo.loss.parts import LossParts, sum_parts

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
