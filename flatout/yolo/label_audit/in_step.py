"""What steps of a training see of each label: summed up on the training's device, while it trains.

    maps, assignment of the loss --> numbers per target --label ids--> sums per label of this epoch --> LabelStatistics

A target is one appearance of a label: moved, cut off, recoloured, next to other images. Its cells are those that the
loss assigned to it, so its loss is the one that was trained with. Nothing here waits for the device, all shapes follow
from the inputs (a CUDA graph can contain it), and nothing that the training computes is changed. On a GPU with Triton
kernels.py does the same in three kernels instead of a hundred.

Dimension key:  T targets, or labels of the data set   M matches, or slots for matches   O channels   C classes
                K columns of sums   L labels of tiles   U those of them that are used
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.engine import never_compiled
from flatout.ranks import World
from flatout.yolo.boxes import paired_ciou, paired_iou
from flatout.yolo.label_audit.rank import CLASS_IOU, SAME_OBJECT, SAME_PLACE, Ramp
from flatout.yolo.label_audit.statistics import CLASS_BITS, COLUMNS, SCORE_UNITS
from flatout.yolo.loss.kernel_support import can_use_kernels
from flatout.yolo.loss.losses import Assigned, LossConfig, as_images, bce, class_loss, matched_boxes
from flatout.yolo.loss.matches import Anchors, Cell, unpack_cells
from flatout.yolo.loss.ota import Maps
from flatout.yolo.multihead.joined_maps import JoinedMap


class TargetTerms(NamedTuple):
    """What the network said about each target; float32 [T], 0 for targets without a cell."""

    seen: Tensor
    """1 for a target with at least one cell, else 0."""
    own: Tensor
    """Confidence that there is an object of the target's class at its place: the highest of its cells. Likewise
    near, other and iou."""
    near: Tensor
    """Confidence that there is any object near it."""
    other: Tensor
    """Confidence that there is an object of another class at its place."""
    iou: Tensor
    """IoU with the predicted box."""
    loss: Tensor
    """Mean over its cells of the box, objectness and class loss, with their gains."""
    confused: Tensor
    """int32: `other` and that class, packed so that the larger number is the more confident one; 0 without one."""


class LabelSums:
    """Sums over the appearances of every label since the beginning of an epoch, on the device."""

    def __init__(self, num_labels: int, anchors: Anchors, config: LossConfig, device: torch.device) -> None:
        self._anchors, self._config = anchors, config
        # The last row takes what belongs to no label: padding, and pasted objects.
        self._sum_TK = torch.zeros((num_labels + 1, len(COLUMNS)), device=device)
        self._confused_T = torch.zeros(num_labels + 1, dtype=torch.int32, device=device)

    @never_compiled
    @torch.no_grad()
    def add(self, maps: Sequence[Tensor], assigned: Assigned, label_T1: Tensor) -> None:
        """Add the targets of a step; `label_T1` is the field `label_ids` of its batch.

        Targets whose loss is not finite are left out: such a step changes no weight, and one of them would make all
        later sums not a number. The order in which the GPU kernels add is not fixed, so torch operations do it if
        training is deterministic.
        """
        if can_use_kernels(maps) and not torch.are_deterministic_algorithms_enabled():
            from flatout.yolo.label_audit.kernels import add_on_device  # imports Triton

            with torch.cuda.device(maps[0].device):
                add_on_device(self._sum_TK, self._confused_T, maps, assigned, label_T1, self._anchors, self._config)
            return
        with torch.autocast(maps[0].device.type, enabled=False):
            terms = target_terms(maps, assigned, self._anchors, self._config)
        nowhere = len(self._sum_TK) - 1
        counts_T = (label_T1[:, 0] >= 0) & (terms.seen > 0) & terms.loss.isfinite()
        label_T = torch.where(counts_T, label_T1[:, 0].long(), nowhere)
        self._sum_TK.index_add_(0, label_T, torch.stack(terms[: len(COLUMNS)], 1))
        self._confused_T.scatter_reduce_(0, label_T, terms.confused, "amax")

    def read(self) -> dict[str, Tensor]:
        """Copies on the host, without the row that belongs to no label; the host waits for the device."""
        return {"sum": self._sum_TK[:-1].cpu(), "confused": self._confused_T[:-1].cpu()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Continue with what `read` returned."""
        self._sum_TK[:-1].copy_(saved["sum"])
        self._confused_T[:-1].copy_(saved["confused"])

    def clear(self) -> None:
        self._sum_TK.zero_()
        self._confused_T.zero_()


def target_terms(maps: Sequence[Tensor], assigned: Assigned, anchors: Anchors, config: LossConfig) -> TargetTerms:
    """The terms of every target, from the cells that were assigned to it."""
    target_T6, matches, heads = assigned
    views = as_images(maps, heads, anchors)
    is_used_M = matches.target_M >= 0
    # Empty slots hold anything. They read the first cell, and what comes of it goes to a row that is dropped.
    target_M, image_M = (torch.where(is_used_M, number, 0).long() for number in (matches.target_M, matches.image_M))
    cell = Cell(*(torch.where(is_used_M, number, 0) for number in unpack_cells(matches.packed_M)))
    logits_MO = _read_cells(views, image_M, cell)
    box_M4, true_M4 = matched_boxes(logits_MO, target_T6, views, cell, target_M, anchors)
    iou_M, ciou_M = paired_iou(box_M4, true_M4), paired_ciou(box_M4, true_M4)

    class_M = target_T6[target_M, 1].long().clamp(0, logits_MO.shape[1] - 6)
    object_M = logits_MO[:, 4].sigmoid()
    score_MC = object_M[:, None] * logits_MO[:, 5:].sigmoid()
    if score_MC.shape[1] == 1:
        score_MC = object_M[:, None]  # the confidence of a network with one class is its objectness
    if heads is not None:
        score_MC = score_MC * heads.own_HP[image_M % heads.num]
    own_M = score_MC.gather(1, class_M[:, None])[:, 0]
    other_M, other_class_M = score_MC.scatter(1, class_M[:, None], 0.0).max(1)
    near_M = torch.maximum(own_M, other_M) * _ramp(SAME_OBJECT, iou_M)
    other_M = other_M * (iou_M >= CLASS_IOU)

    true_object_M = (1 - config.gr) + config.gr * ciou_M.clamp(min=0)
    loss_M = (
        config.box * (1 - ciou_M)
        + config.obj * bce(logits_MO[:, 4], true_object_M, config.obj_pw, config)
        + config.cls * class_loss(logits_MO[:, 5:], class_M, config, heads, image_M)
    )

    num_targets = len(target_T6)
    row_M = torch.where(is_used_M, target_M, num_targets)
    best_MK = torch.stack((own_M * _ramp(SAME_PLACE, iou_M), near_M, other_M, iou_M), 1)
    best_T4 = best_MK.new_zeros((num_targets + 1, 4))
    best_T4.scatter_reduce_(0, row_M[:, None].expand(-1, 4), best_MK, "amax")
    sum_T2 = best_MK.new_zeros((num_targets + 1, 2))
    sum_T2.index_add_(0, row_M, torch.stack((loss_M, torch.ones_like(loss_M)), 1))
    loss_T, count_T = sum_T2[:-1].unbind(1)
    is_seen_T = (count_T > 0) & (target_T6[:, 0] >= 0)
    confused_T = torch.zeros(num_targets + 1, dtype=torch.int32, device=row_M.device)
    if heads is None and score_MC.shape[1] <= 1 << CLASS_BITS:
        confused_T.scatter_reduce_(0, row_M, pack_confusion(other_M, other_class_M), "amax")
    own_T, near_T, other_T, iou_T = best_T4[:-1].unbind(1)
    return TargetTerms(
        is_seen_T.float(), own_T, near_T, other_T, iou_T, loss_T / count_T.clamp(min=1), confused_T[:-1]
    )  # fmt: skip


def pack_confusion(score: Tensor, class_number: Tensor) -> Tensor:
    """A confidence and its class as one int32; larger for a larger confidence, 0 for none."""
    units = (score * SCORE_UNITS).int()
    return torch.where(units > 0, (units << CLASS_BITS) | class_number.int(), 0)


def _read_cells(views: Sequence[Maps], image_M: Tensor, cell: Cell) -> Tensor:
    """All channels of these cells, float32 [M, O]. Every layer is read for every match, so that nothing depends on how
    many matches a layer has."""
    logits_MO = None
    for layer, view in enumerate(views):
        _, num_anchors, rows, columns, _ = view.shape
        is_here_M = cell.layer == layer
        row_M, column_M = (torch.where(is_here_M, number, 0) for number in (cell.row, cell.column))
        if isinstance(view, JoinedMap):
            read_MO = view.rows(((image_M * num_anchors + cell.anchor) * rows + row_M) * columns + column_M)
        else:
            read_MO = view[image_M, cell.anchor, row_M, column_M]
        read_MO = read_MO.float()
        logits_MO = read_MO if logits_MO is None else torch.where(is_here_M[:, None], read_MO, logits_MO)
    assert logits_MO is not None
    return logits_MO


def _ramp(ramp: Ramp, x: Tensor) -> Tensor:
    return ((x - ramp.low) / (ramp.high - ramp.low)).clamp(0, 1)


def sums_of_all_ranks(sums: LabelSums, world: World) -> dict[str, np.ndarray] | None:
    """The sums of all ranks together, on the first rank; None on the others."""
    own = {name: tensor.numpy() for name, tensor in sums.read().items()}
    gathered = world.gather(own)
    if gathered is None:
        return None
    total = np.sum([each["sum"] for each in gathered], 0)
    return {"sum": total, "confused": np.max([each["confused"] for each in gathered], 0)}


def sums_of_whole_labels(
    sums: Mapping[str, np.ndarray], label_L: np.ndarray, is_used_L: np.ndarray, num_labels: int
) -> dict[str, np.ndarray]:
    """The sums of labels in tiles, `label_L`, as those of the labels of whole images; only entries `is_used_L`.

    A tile that cuts an object off says less about its label than one that shows all of it.
    """
    label_U = label_L[is_used_L]
    sum_TK = np.zeros((num_labels, len(COLUMNS)), np.float32)
    np.add.at(sum_TK, label_U, sums["sum"][is_used_L])
    confused_T = np.zeros(num_labels, np.int32)
    np.maximum.at(confused_T, label_U, sums["confused"][is_used_L])
    return {"sum": sum_TK, "confused": confused_T}
