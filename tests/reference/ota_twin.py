"""Reference implementation (twin) of flatout/yolo/loss: YOLOv7's losses, one image at a time.

Written from the definition with ordinary operations, vectorised over the targets and candidates of an image. It shares
only the box functions with the batched code, and these have their own goldens.

Dimension key:  T targets   L layers   A anchors   K offsets of cells: centre, left, up, right, down
                R targets of an image   P its candidates   D their distinct cells   C classes   n matches of a layer
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.yolo.boxes import cxcywh_to_xyxy, paired_ciou, pairwise_iou
from flatout.yolo.loss import LossConfig

BALANCE = {3: (4.0, 1.0, 0.4), 4: (4.0, 1.0, 0.25, 0.06)}
ClassCost = Callable[[Tensor, Tensor], Tensor]


class Twin(NamedTuple):
    """Match lists, per layer int64 [n, 5] of image, anchor, row, column, target; and cells taken per target, [T]."""

    lists: list[Tensor]
    num_taken: Tensor


def candidates(shape: torch.Size, targets: Tensor, anchors_A2: Tensor, anchor_t: float, reach: float) -> Tensor:
    """Candidates of one layer in list order: int64 [n, 5]."""
    batch_size, _, num_rows, num_columns, _ = shape
    sides = torch.tensor([num_columns, num_rows], device=targets.device)
    centre, size = targets[:, 2:4] * sides, targets[:, 4:6] * sides
    real = (targets[:, 0] >= 0) & (targets[:, 0] < batch_size)
    ratio = size[None] / anchors_A2[:, None]
    fits_AT = torch.maximum(ratio, 1 / ratio).amax(2) < anchor_t
    left, up = ((centre % 1 < reach) & (centre > 1)).T
    right, down = (((sides - centre) % 1 < reach) & (sides - centre > 1)).T
    near_KT = torch.stack((torch.ones_like(left), left, up, right, down)) & real
    kind, anchor, which = torch.nonzero(near_KT[:, None] & fits_AT, as_tuple=True)
    step = reach * torch.tensor([[0, 0], [-1, 0], [0, -1], [1, 0], [0, 1]], device=targets.device)
    column, row = (centre[which] + step[kind]).long().unbind(1)
    column, row = column.clamp(0, num_columns - 1), row.clamp(0, num_rows - 1)
    return torch.stack((targets[which, 0].long(), anchor, row, column, which), 1)


def class_cost_by_definition(prob_DC: Tensor, class_R: Tensor) -> Tensor:
    """Binary cross-entropy with the one-hot class, summed over the classes, as defined: [R, D]."""
    logit_RDC = torch.log(prob_DC / (1 - prob_DC)).expand(len(class_R), -1, -1)
    true_RDC = F.one_hot(class_R, prob_DC.shape[1]).float()[:, None].expand_as(logit_RDC)
    return F.binary_cross_entropy_with_logits(logit_RDC, true_RDC, reduction="none").sum(2)


def class_cost_in_closed_form(prob_DC: Tensor, class_R: Tensor) -> Tensor:
    """The same from a sum over the classes per candidate, without a tensor targets x candidates x classes: [R, D]."""
    logit_DC = torch.log(prob_DC / (1 - prob_DC))
    return (F.softplus(logit_DC).sum(1, keepdim=True) - logit_DC).T[class_R]


class Pairs(NamedTuple):
    """All pairs of an image's targets and candidates, [R, P]."""

    iou: Tensor
    cost: Tensor


def pairs_of_image(
    layers: Sequence[Tensor],
    maps: Sequence[Tensor],
    targets_R6: Tensor,
    anchors_LA2: Tensor,
    strides: Sequence[float],
    class_cost: ClassCost,
) -> Pairs:
    """Overlap and cost of every pair, in the dtype of the targets; `layers` lists the candidates of each layer."""
    boxes, probs = [], []
    for entries_n5, one_map, anchors_A2, stride in zip(layers, maps, anchors_LA2, strides, strict=True):
        image, anchor, row, column, _ = entries_n5.unbind(1)
        logits = one_map[image, anchor, row, column].to(targets_R6)
        centre = (2 * logits[:, :2].sigmoid() - 0.5 + torch.stack((column, row), 1)) * stride
        size = (2 * logits[:, 2:4].sigmoid()) ** 2 * anchors_A2[anchor] * stride
        boxes.append(cxcywh_to_xyxy(torch.cat((centre, size), 1)))
        probs.append((logits[:, 5:].sigmoid() * logits[:, 4:5].sigmoid()).sqrt())
    # Costs once per distinct cell, so that two candidates of one cell tie exactly.
    cell_P = torch.cat([_cell_number(layer, each) for layer, each in enumerate(layers)])
    distinct_D, same_P = torch.unique(cell_P, return_inverse=True)
    index_P = torch.arange(len(cell_P), device=cell_P.device)
    first_D = torch.full_like(distinct_D, len(cell_P)).scatter_reduce(0, same_P, index_P, "amin")
    height_px = maps[0].shape[2] * strides[0]
    iou_RD = pairwise_iou(cxcywh_to_xyxy(targets_R6[:, 2:6] * height_px), torch.cat(boxes)[first_D])
    cost_RD = class_cost(torch.cat(probs)[first_D], targets_R6[:, 1].long()) + 3 * -torch.log(iou_RD + 1e-8)
    return Pairs(iou_RD[:, same_P], cost_RD[:, same_P].nan_to_num(nan=torch.inf))


def deal_out(pairs: Pairs, top: int) -> tuple[Tensor, Tensor]:
    """For each candidate its row or -1 [P], and how many candidates each row takes [R]."""
    k_R = pairs.iou.topk(min(top, pairs.iou.shape[1]), 1).values.sum(1).int().clamp(min=1)
    rank_RP = pairs.cost.argsort(stable=True, dim=1).argsort(dim=1)
    taken_RP = rank_RP < k_R[:, None]
    owner_P = torch.where(taken_RP.sum(0) > 1, pairs.cost.argmin(0), taken_RP.int().argmax(0))
    return torch.where(taken_RP.any(0), owner_P, -1), k_R


def _cell_number(layer: int, entries_n5: Tensor) -> Tensor:
    """A different number for every cell of an image."""
    _, anchor, row, column, _ = entries_n5.unbind(1)
    return ((layer * 8 + anchor) * 4096 + row) * 4096 + column


def twin_assign(
    maps: Sequence[Tensor],
    targets: Tensor,
    anchors_LA2: Tensor,
    strides: Sequence[float],
    *,
    anchor_t: float = 4.0,
    reach: float = 0.5,
    top: int = 10,
    ota: bool = True,
    class_cost: ClassCost = class_cost_by_definition,
) -> Twin:
    """Match lists of the batch, with a loop over its images."""
    all_layers = [
        candidates(one_map.shape, targets, anchors_A2, anchor_t, reach)
        for one_map, anchors_A2 in zip(maps, anchors_LA2, strict=True)
    ]
    num_taken = torch.zeros(len(targets), dtype=torch.int32, device=targets.device)
    if not ota:
        return Twin(all_layers, num_taken)
    lists = [[each[:0]] for each in all_layers]
    for image in range(maps[0].shape[0]):
        (row_R,) = torch.nonzero(targets[:, 0].long() == image, as_tuple=True)
        layers = [each[each[:, 0] == image] for each in all_layers]
        sizes = [len(each) for each in layers]
        if not len(row_R) or not sum(sizes):
            continue
        pairs = pairs_of_image(layers, maps, targets[row_R], anchors_LA2, strides, class_cost)
        owner_P, num_taken[row_R] = deal_out(pairs, top)
        for entries_n5, owner_n, matches in zip(layers, owner_P.split(sizes), lists, strict=True):
            kept = owner_n >= 0
            matches.append(torch.cat((entries_n5[kept, :4], row_R[owner_n[kept]][:, None]), 1))
    return Twin([torch.cat(each) for each in lists], num_taken)


def margin_of_image(pairs: Pairs, top: int) -> float:
    """The smallest margin of an image's decisions; exact ties do not count, because a rule decides them."""
    owner_P, k_R = deal_out(pairs, top)
    total_R = pairs.iou.topk(min(top, pairs.iou.shape[1]), 1).values.sum(1)
    gaps = [(total_R - total_R.round()).abs()[total_R > 0.5]]
    cost_RP = pairs.cost.sort(1).values
    beyond_R = k_R.long().clamp(max=cost_RP.shape[1] - 1)[:, None]
    gaps.append((cost_RP.gather(1, beyond_R) - cost_RP.gather(1, beyond_R - 1))[k_R < cost_RP.shape[1]].flatten())
    if len(k_R) > 1:
        first, second = pairs.cost[:, owner_P >= 0].sort(0).values[:2]
        gaps.append(second - first)
    gap = torch.cat(gaps)
    return float(gap[gap > 1e-12].min()) if (gap > 1e-12).any() else float("inf")


def twin_loss(
    maps: Sequence[Tensor], targets: Tensor, lists: Sequence[Tensor], anchors_LA2: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Loss and items of one head from its match lists, layer by layer, with gradients by autograd."""
    box = cls = obj = torch.zeros((), device=targets.device)
    for one_map, entries_n5, anchors_A2, balance in zip(maps, lists, anchors_LA2, BALANCE[len(maps)], strict=True):
        cells, target = entries_n5[:, :4].unbind(1), entries_n5[:, 4]
        true_obj = torch.zeros(one_map.shape[:4], device=one_map.device)
        if len(entries_n5):
            logits = one_map[cells].float()
            ciou = paired_ciou(*_boxes(logits, one_map.shape, entries_n5, targets, anchors_A2))
            box = box + (1 - ciou).mean()
            _write_in_order(true_obj, cells, (1 - config.gr) + config.gr * ciou.detach().clamp(min=0))
            if logits.shape[1] > 6:
                true = torch.full_like(logits[:, 5:], 0.5 * config.label_smoothing)
                true[torch.arange(len(true)), targets[target, 1].long()] = 1 - 0.5 * config.label_smoothing
                cls = cls + _bce(logits[:, 5:], true, config.cls_pw, config.fl_gamma)
        obj = obj + balance * _bce(one_map[..., 4].float(), true_obj, config.obj_pw, config.fl_gamma)
    parts = torch.stack((config.box * box, config.obj * obj, config.cls * cls))
    return parts.sum() * maps[0].shape[0], torch.cat((parts, parts.sum()[None])).detach()


def _boxes(
    logits: Tensor, shape: torch.Size, entries_n5: Tensor, targets: Tensor, anchors_A2: Tensor
) -> tuple[Tensor, Tensor]:
    """Predicted and true boxes in cells, relative to the matched cell's corner."""
    _, anchor, row, column, target = entries_n5.unbind(1)
    sides = torch.tensor([shape[3], shape[2]], device=targets.device)
    size = (2 * logits[:, 2:4].sigmoid()) ** 2 * anchors_A2[anchor]
    true_centre = targets[target, 2:4] * sides - torch.stack((column, row), 1)
    true = torch.cat((true_centre, targets[target, 4:6] * sides), 1)
    return torch.cat((2 * logits[:, :2].sigmoid() - 0.5, size), 1), true


def _write_in_order(cells: Tensor, index: tuple[Tensor, ...], values: Tensor) -> None:
    """Write values so that the last one of a cell remains."""
    if cells.is_cuda:
        cells[index] = values  # the order is undefined there; losses are compared on the CPU
    else:
        cells.numpy()[tuple(each.numpy() for each in index)] = values.numpy()


def _bce(logits: Tensor, true: Tensor, positive_weight: float, gamma: float) -> Tensor:
    weight = torch.tensor(positive_weight, device=logits.device)
    loss = F.binary_cross_entropy_with_logits(logits, true, pos_weight=weight, reduction="none")
    if gamma:
        prob = logits.sigmoid()
        prob_of_truth = true * prob + (1 - true) * (1 - prob)
        loss = loss * (0.25 * true + 0.75 * (1 - true)) * (1 - prob_of_truth) ** gamma
    return loss.mean()
