"""YOLOv7's three losses: plain, OTA, and OTA with auxiliary heads.

    maps, targets --assign_all or assign_ota--> Matches --head_loss--> LossParts

All take `maps`, one raw prediction map [images, anchors, rows, columns, 5 + classes] per layer (channels x, y, w, h,
objectness, classes; any float dtype, computed in float32), and `targets_T6` with one row per box: image, class, and the
centre and size of the box relative to the image. Rows may be in any order; rows whose image is negative are padding.

On a GPU nothing here makes the host wait, and the only shape that depends on the data is T. To capture a step in a CUDA
graph, or to compile it once, pad `targets_T6` to a fixed T and run one step before (which compiles the kernels).

Dimension key:  T targets   L layers   N matches, sorted by layer   n matches of one layer   C classes
                O channels, 5 + classes   S cells of all layers   s cells of one layer   H heads
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.clock import clock
from flatout.engine import never_compiled
from flatout.yolo.boxes import paired_ciou
from flatout.yolo.loss.kernel_support import can_use_kernels, constants
from flatout.yolo.loss.matches import Anchors, Cell, Matches, Search, check_maps, unpack_cells
from flatout.yolo.loss.ota import (
    Maps,
    cells_per_layer,
    flat_index,
    gather_cells,
    last_of_same_cell,
    list_candidates,
    split_by_layer,
    torch_assign_ota,
)
from flatout.yolo.multihead.head_config import OBJECTNESS
from flatout.yolo.multihead.joined_maps import Heads, JoinedMap, route

# Configuration

_BALANCE = {3: (4.0, 1.0, 0.4)}
_BALANCE_OTHERWISE = (4.0, 1.0, 0.25, 0.06, 0.02)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Gains and options of a loss, under the names of YOLOv7's hyp files; the defaults are those of the P5 networks."""

    box: float = 0.05
    obj: float = 0.7
    cls: float = 0.3
    """Gains of the three terms as applied; `scaled` computes them from those of a hyp file."""

    obj_pw: float = 1.0
    cls_pw: float = 1.0
    """Weights of positives in the binary cross-entropies."""

    anchor_t: float = 4.0
    """A target fits an anchor if neither side differs by this factor or more."""

    fl_gamma: float = 0.0
    """Exponent of the focal loss; 0 is plain cross-entropy."""

    label_smoothing: float = 0.0
    gr: float = 1.0
    """The objectness target of a matched cell is (1 - gr) + gr * CIoU."""

    def __post_init__(self) -> None:
        for field in fields(self):
            # Hyp files write 1 for 1.0, and a kernel would be compiled separately for the integer.
            object.__setattr__(self, field.name, float(getattr(self, field.name)))
        for name in ("box", "obj", "cls", "obj_pw", "cls_pw", "fl_gamma"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"loss.{name}={getattr(self, name)} must not be negative.")
        if not self.anchor_t > 1:
            raise ValueError(f"loss.anchor_t={self.anchor_t} matches no target; it must be above 1 (YOLOv7 uses 4).")
        for name in ("label_smoothing", "gr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"loss.{name}={getattr(self, name)} must be from 0 to 1.")

    def scaled(self, *, num_layers: int, num_classes: int, image_size_px: int) -> "LossConfig":
        """The gains that training applies; those of a hyp file are for three layers, 80 classes and 640 px."""
        per_layer = 3 / num_layers
        return replace(
            self,
            box=self.box * per_layer,
            cls=self.cls * num_classes / 80 * per_layer,
            obj=self.obj * (image_size_px / 640) ** 2 * per_layer,
        )


def default_balance(num_layers: int) -> tuple[float, ...]:
    """Weight of each layer's objectness loss; the finest layer has the most cells, and the most easy ones."""
    return _BALANCE.get(num_layers, _BALANCE_OTHERWISE[:num_layers])


# Results


ITEM_NAMES = ("box", "obj", "cls", "total")
"""Names of `LossParts.items`, in their order."""


class Assigned(NamedTuple):
    """What the cells of a head were trained to predict, for statistics about single targets."""

    target_T6: Tensor
    """The targets; of head images, if there are several heads."""
    matches: Matches
    heads: Heads | None


class LossParts(NamedTuple):
    """A loss and its parts, on the device of the maps; reading a value makes the host wait."""

    total: Tensor
    """(box + obj + cls) times the number of images, float32 scalar; the value to call backward() on."""

    items: Tensor
    """Detached [4]: box, obj, cls and their sum, with gains, not multiplied by the number of images."""

    obj_L: Tensor
    """Detached [L]: mean objectness loss of each layer, without gain or balance, for `rebalance`."""

    assigned: Assigned | None = None
    """The assignment; that of the lead head, if there is an auxiliary one."""

    @property
    def box(self) -> Tensor:
        return self.items[0]

    @property
    def obj(self) -> Tensor:
        return self.items[1]

    @property
    def cls(self) -> Tensor:
        return self.items[2]


def sum_parts(parts: Sequence[LossParts]) -> LossParts:
    """The sum of the losses of several heads; `obj_L` is that of the first."""
    first, *others = parts
    total, items = first.total, first.items
    for other in others:
        total, items = total + other.total, items + other.items
    return LossParts(total, items, first.obj_L, first.assigned)


def rebalance(balance_L: Tensor, obj_L: Tensor, strides_px: Sequence[float]) -> Tensor:
    """The next step's balance, moved towards equal objectness losses: YOLOv7's autobalance, off in its trainers."""
    moved_L = 0.9999 * balance_L + 0.0001 / obj_L
    return moved_L / moved_L[list(strides_px).index(16.0)]


# Losses

AUX_WEIGHT = 0.25
AUX_TOP = 20


def plain_loss(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, config: LossConfig, balance_L: Tensor | None = None
) -> LossParts:
    """Loss with every candidate cell matched to its target."""
    with clock.stage("assign"):
        matches = assign_all(maps, targets_T6, anchors, Search(anchor_t=config.anchor_t))
    return head_loss(maps, targets_T6, matches, anchors, config, balance_L)


def ota_loss(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, config: LossConfig, balance_L: Tensor | None = None
) -> LossParts:
    """Loss with the OTA assignment: candidates go to the targets of an image by the network's predictions."""
    with clock.stage("assign"):
        matches = assign_ota(maps, targets_T6, anchors, Search(anchor_t=config.anchor_t))
    return head_loss(maps, targets_T6, matches, anchors, config, balance_L)


def aux_ota_loss(
    lead_maps: Sequence[Tensor],
    aux_maps: Sequence[Tensor],
    targets_T6: Tensor,
    anchors: Anchors,
    config: LossConfig,
    balance_L: Tensor | None = None,
) -> LossParts:
    """OTA loss of a lead head and its auxiliary head, which is matched by a wider search on the lead's predictions."""
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


@never_compiled
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
    """Box, objectness and class loss of one head, given its matches, times `weight`; of several heads with `heads`.

    Box and class loss: mean over a layer's matches, summed over the layers. Objectness: mean over a layer's cells,
    summed with the weights `balance_L` (float32 [L]; by default YOLOv7's). For heads with separate maps call it once
    per head and add with `sum_parts`; a head for some of the classes gets targets with its own class numbers, and the
    other targets marked as padding. With `heads` the maps are joined, and the images of `targets_T6` are head images
    (multihead/joined_maps.py).
    """
    check_maps(maps, anchors, joined=heads is not None)
    if balance_L is None:
        balance_L = constants(default_balance(len(maps)), maps[0].device)
    if matches.spans is not None and can_use_kernels(maps):
        from flatout.yolo.loss.on_device import device_head_loss  # imports Triton

        with torch.cuda.device(maps[0].device):
            parts = device_head_loss(maps, targets_T6, matches, anchors, config, balance_L, weight, heads)
    else:
        with torch.autocast(maps[0].device.type, enabled=False):
            parts = torch_head_loss(
                as_images(maps, heads, anchors), targets_T6, matches, anchors, config, balance_L, weight, heads
            )
    return parts._replace(assigned=Assigned(targets_T6, matches, heads))


# Assignment: by kernels on a GPU, by torch operations elsewhere, with the same matches
#
# With `heads` the maps are joined ones of several heads, and the targets are routed (multihead/joined_maps.py).
# In a compiled step these functions run eagerly between two compiled parts: there is nothing left to fuse.


@never_compiled
@torch.no_grad()
def route_all(maps: Sequence[Tensor], targets_T6: Tensor, heads: Heads) -> Tensor:
    """Targets assigned to head images, by kernels if possible (`joined_maps.route`)."""
    if can_use_kernels(maps):
        from flatout.yolo.loss.on_device import route_on_device  # imports Triton

        with torch.cuda.device(maps[0].device):
            return route_on_device(targets_T6, heads)
    return route(targets_T6, heads)


def as_images(maps: Sequence[Tensor], heads: Heads | None, anchors: Anchors) -> Sequence[Tensor] | Sequence[JoinedMap]:
    """Maps whose first axis is images, or head images: joined maps as views, those of a single head unchanged."""
    return maps if heads is None else [JoinedMap(each, heads, anchors.size_LA2.shape[1]) for each in maps]


@never_compiled
@torch.no_grad()
def assign_all(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, search: Search, heads: Heads | None = None
) -> Matches:
    """Match every candidate cell with its target."""
    check_maps(maps, anchors, joined=heads is not None)
    if can_use_kernels(maps):
        from flatout.yolo.loss.on_device import list_on_device  # imports Triton

        with torch.cuda.device(maps[0].device):
            return list_on_device(maps, targets_T6, anchors, search, heads)
    return list_candidates(as_images(maps, heads, anchors), targets_T6, anchors, search)


@never_compiled
@torch.no_grad()
def assign_ota(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, search: Search, heads: Heads | None = None
) -> Matches:
    """Match candidate cells with the targets of their image by cost (see ota.py)."""
    check_maps(maps, anchors, joined=heads is not None)
    if can_use_kernels(maps):
        from flatout.yolo.loss.on_device import ota_on_device  # imports Triton

        with torch.cuda.device(maps[0].device):
            return ota_on_device(maps, targets_T6, anchors, search, heads)
    with torch.autocast(maps[0].device.type, enabled=False):
        own_HP = None if heads is None else heads.own_HP
        return torch_assign_ota(as_images(maps, heads, anchors), targets_T6, anchors, search, own_HP)


# Loss of one head by torch operations


class LayerMatches(NamedTuple):
    """Matches sorted by layer, without empty slots; int64 [N] each."""

    cell: Cell
    image: Tensor
    cell_index: Tensor
    """Flat index of the cell over all layers (ota.flat_index)."""
    target: Tensor
    num_per_layer: list[int]


def torch_head_loss(
    maps: Sequence[Maps],
    targets_T6: Tensor,
    matches: Matches,
    anchors: Anchors,
    config: LossConfig,
    balance_L: Tensor,
    weight: float,
    heads: Heads | None = None,
) -> LossParts:
    """`head_loss` for any device; pass `heads` if the maps are views of joined maps.

    On a GPU it makes the host wait for the number of matches.
    """
    entries = sort_by_layer(maps, matches)
    logits_NO, objectness_S = read_cells(maps, entries)
    ciou_N = paired_ciou(*matched_boxes(logits_NO, targets_T6, maps, entries.cell, entries.target, anchors))
    weight_N = (
        _match_weights_by_layer(entries.num_per_layer, logits_NO)
        if heads is None
        else _match_weights_by_head(heads, entries, num_layers=len(maps))
    )
    box = torch.dot(1 - ciou_N, weight_N)
    class_N = targets_T6[entries.target, 1].long()
    cls = torch.dot(class_loss(logits_NO[:, 5:], class_N, config, heads, entries.image), weight_N)
    true_S = _true_objectness(entries, ciou_N.detach(), config.gr, len(objectness_S))
    obj_S = bce(objectness_S, true_S, config.obj_pw, config)
    num_images, layers = maps[0].shape[0], obj_S.split(cells_per_layer(maps))
    obj_L = torch.stack([_mean_of_cells(layer, heads, num_images) for layer in layers])
    parts_3 = torch.stack((config.box * box, config.obj * torch.dot(obj_L, balance_L), config.cls * cls)) * weight
    total = parts_3.sum()
    items_4 = torch.cat((parts_3, total[None])).detach()
    batch_size = num_images if heads is None else num_images // heads.num
    return LossParts(total * batch_size, items_4, obj_L.detach())


def matched_boxes(
    logits_NO: Tensor, targets_T6: Tensor, maps: Sequence[Maps], cell: Cell, target_N: Tensor, anchors: Anchors
) -> tuple[Tensor, Tensor]:
    """Predicted and true boxes in cells, relative to the corner of the matched cell, cxcywh [N, 4]."""
    layer_N, anchor_N, row_N, column_N = cell
    doubled_N4 = 2 * logits_NO[:, :4].sigmoid()
    size_N2 = doubled_N4[:, 2:].square() * anchors.size_LA2.to(logits_NO)[layer_N, anchor_N]
    sides = tuple(float(side) for each in maps for side in (each.shape[3], each.shape[2]) * 2)
    sides_L4 = constants(sides, logits_NO.device).view(-1, 4)
    true_N4 = targets_T6[target_N, 2:6].float() * sides_L4[layer_N]
    true_N4[:, :2] -= torch.stack((column_N, row_N), 1)
    return torch.cat((doubled_N4[:, :2] - 0.5, size_N2), 1), true_N4


def _match_weights_by_layer(num_per_layer: Sequence[int], like: Tensor) -> Tensor:
    """Weight of each match, float32 [N]: one over the number of matches in its layer, so that layers count equally."""
    weight_L = like.new_tensor([1 / max(num, 1) for num in num_per_layer])
    return weight_L.repeat_interleave(torch.tensor(num_per_layer, device=like.device), output_size=len(like))


def _match_weights_by_head(heads: Heads, entries: LayerMatches, *, num_layers: int) -> Tensor:
    """Weight of each match, float32 [N]: the weight of its head over the number of the head's matches in its layer."""
    head_N = entries.image % heads.num
    group_N = head_N * num_layers + entries.cell.layer
    num_G = torch.bincount(group_N, minlength=heads.num * num_layers)
    return heads.weight_H[head_N] / num_G[group_N]


def _mean_of_cells(loss_S: Tensor, heads: Heads | None, num_images: int) -> Tensor:
    """Mean over the cells of a layer; for several heads the weighted sum of their means."""
    if heads is None:
        return loss_S.mean()
    return torch.dot(loss_S.view(num_images // heads.num, heads.num, -1).mean((0, 2)), heads.weight_H)


def class_loss(logits_NC: Tensor, class_N: Tensor, config: LossConfig, heads: Heads | None, image_N: Tensor) -> Tensor:
    """Class loss of each match, [N]: the mean over the classes, or zero if there is only one class."""
    num_classes = logits_NC.shape[1]
    if num_classes == 1:
        return logits_NC.new_zeros(len(logits_NC))
    true_NC = torch.full_like(logits_NC, 0.5 * config.label_smoothing)
    true_NC.scatter_(1, class_N[:, None], 1 - 0.5 * config.label_smoothing)
    loss_NC = bce(logits_NC, true_NC, config.cls_pw, config)
    if heads is None:
        return loss_NC.mean(1)
    head_N = image_N % heads.num
    return (loss_NC * heads.own_HP[head_N]).sum(1) * heads.class_share_H[head_N]


def _true_objectness(entries: LayerMatches, ciou_N: Tensor, gr: float, num_cells: int) -> Tensor:
    """Objectness target of every cell, float32 [S]: from the overlap of its last match, 0 without a match."""
    true_S = ciou_N.new_zeros(num_cells)
    value_N = (1 - gr) + gr * ciou_N.clamp(min=0)
    # All matches of a cell write the value of the last one, so the order of writing does not matter.
    true_S[entries.cell_index] = value_N[last_of_same_cell(entries.cell_index, num_cells)]
    return true_S


def bce(logits: Tensor, true: Tensor, positive_weight: float, config: LossConfig) -> Tensor:
    """Binary cross-entropy of each element, focal if configured."""
    # A weight of 1 is left out, because it would cost another pass over the maps.
    weight = None if positive_weight == 1 else constants((positive_weight,), logits.device)
    loss = F.binary_cross_entropy_with_logits(logits, true, pos_weight=weight, reduction="none")
    if config.fl_gamma == 0:
        return loss
    prob = logits.sigmoid()
    # 1 - p_true, written without cancellation.
    error = true * (1 - prob) + (1 - true) * prob
    return loss * (0.25 * true + 0.75 * (1 - true)) * error**config.fl_gamma


# Reading the maps
#
# The loss needs all channels of a few matched cells and one channel, objectness, of all cells. Indexing a map twice
# would make autograd build two gradients of the map's size and add them; here there is one, written once.


def sort_by_layer(maps: Sequence[Maps], matches: Matches) -> LayerMatches:
    """Matches sorted by layer, in list order within a layer. Makes the host wait for their number."""
    cell, num_layers = unpack_cells(matches.packed_M), len(maps)
    layer_M = torch.where(matches.target_M >= 0, cell.layer, num_layers)
    num_per_layer = torch.bincount(layer_M, minlength=num_layers)[:num_layers].tolist()
    order_N = torch.argsort(layer_M, stable=True)[: sum(num_per_layer)]
    cell = Cell(*(each[order_N] for each in cell))
    image_N = matches.image_M[order_N].long()
    index_N = flat_index(maps, image_N, cell)
    return LayerMatches(cell, image_N, index_N, matches.target_M[order_N].long(), num_per_layer)


def read_cells(maps: Sequence[Maps], entries: LayerMatches) -> tuple[Tensor, Tensor]:
    """All channels of the matched cells [N, O], and the objectness logits of all cells [S]; float32."""
    indices = split_by_layer(maps, entries.cell_index, entries.num_per_layer)
    values = [one_map.values_BNYX if isinstance(one_map, JoinedMap) else one_map for one_map in maps]
    logits_NO, objectness_S = _ReadCells.apply(indices, maps, *values)
    return logits_NO, objectness_S


class _ReadCells(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: list[Tensor], maps: Sequence[Maps], *values: Tensor) -> tuple[Tensor, Tensor]:
        # The gradient needs the layouts of the maps only, not their values.
        ctx.joined = [_without_values(one_map) if isinstance(one_map, JoinedMap) else None for one_map in maps]
        ctx.indices, ctx.shapes = indices, [(each.shape, each.dtype) for each in values]
        objectness = [_objectness(*each).reshape(-1) for each in zip(ctx.joined, values, strict=True)]
        ctx.num_cells = [len(each) for each in objectness]
        return gather_cells(maps, indices), torch.cat(objectness).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits_NO: Tensor, grad_objectness_S: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None, None]
        logits = grad_logits_NO.split([len(index_n) for index_n in ctx.indices])
        objectness = grad_objectness_S.split(ctx.num_cells)
        for (shape, dtype), joined, index_n, grad_nO, grad_s in zip(
            ctx.shapes, ctx.joined, ctx.indices, logits, objectness, strict=True
        ):
            grad = torch.zeros(shape, dtype=dtype, device=grad_s.device)
            every_cell = _objectness(joined, grad)
            every_cell.copy_(grad_s.view(every_cell.shape))
            if joined is None:
                grad.view(-1, shape[-1]).index_add_(0, index_n, grad_nO.to(dtype))
            else:
                grad.index_put_(joined.index_of(index_n), grad_nO.to(dtype), accumulate=True)
            grads.append(grad)
        return tuple(grads)


def _objectness(joined: JoinedMap | None, values: Tensor) -> Tensor:
    """Objectness of all cells of a joined map, or of the map of a single head: a view."""
    return values[..., OBJECTNESS] if joined is None else joined.objectness(values)


def _without_values(joined: JoinedMap) -> JoinedMap:
    """The layout of a joined map, which does not keep the map for the backward pass."""
    return replace(joined, values_BNYX=joined.values_BNYX.new_empty(()).expand(joined.values_BNYX.shape))
