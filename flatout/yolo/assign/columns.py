"""What the network says at the candidate cells: the box it predicts there, and what each class would cost.

Dimension key:  M candidates (the columns of the assignment)   C classes   L layers   A anchors
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.assign.cells import (
    Maps,
    cell_number,
    cells_per_layer,
    gather_cells,
    last_of_same_cell,
    split_by_layer,
)
from flatout.yolo.assign.matches import Anchors, Matches, Place, unpack_place


class Columns(NamedTuple):
    """Predictions at the candidates. Candidates of the same cell carry bit-identical numbers, so that ties are ties."""

    corners_px: tuple[Tensor, Tensor, Tensor, Tensor]
    """x1, y1, x2, y2, each float32 [M]."""

    area_px: Tensor
    class_cost: Tensor
    """Flat float32: class part of the cost of giving candidate m to a target of class c, at class_row[m] + c."""

    class_row: Tensor


def read_columns(maps: Sequence[Maps], candidates: Matches, anchors: Anchors, own_HP: Tensor | None = None) -> Columns:
    """Read every candidate's predictions once, in float32. `own_HP`: the class outputs that count, by head."""
    place = unpack_place(candidates.place_M)
    image_M = candidates.image_M.long()
    cell_M = cell_number(maps, image_M, place)
    num_per_layer = torch.bincount(place.layer, minlength=len(maps)).tolist()
    logits_MO = gather_cells(maps, split_by_layer(maps, cell_M, num_per_layer))
    # One set of numbers per cell, its last candidate's: vectorised functions may round the same input differently
    # at the end of an array, and a difference in the last bit would decide instead of the column's index.
    twin_M = last_of_same_cell(cell_M, sum(cells_per_layer(maps)))
    box_xyxy_M4 = _decode_px(logits_MO[:, :4], place, anchors)[twin_M]
    x1, y1, x2, y2 = (each.contiguous() for each in box_xyxy_M4.unbind(1))
    own_MC = None if own_HP is None else own_HP[image_M % len(own_HP)]
    class_cost_MC = _class_cost(logits_MO[:, 4:], own_MC)
    return Columns(
        corners_px=(x1, y1, x2, y2),
        area_px=(x2 - x1) * (y2 - y1),
        class_cost=class_cost_MC.view(-1),
        class_row=twin_M * class_cost_MC.shape[1],
    )


def _decode_px(logits_M4: Tensor, place: Place, anchors: Anchors) -> Tensor:
    """Predicted boxes as corners in pixels of the network input, [M, 4]."""
    stride_M = logits_M4.new_tensor(anchors.strides_px)[place.layer][:, None]
    doubled_M4 = 2 * logits_M4.sigmoid()
    corner_M2 = torch.stack((place.column, place.row), 1)
    centre_M2 = (doubled_M4[:, :2] - 0.5 + corner_M2) * stride_M
    half_M2 = doubled_M4[:, 2:].square() * anchors.size_LA2[place.layer, place.anchor] * (stride_M / 2)
    return torch.cat((centre_M2 - half_M2, centre_M2 + half_M2), 1)


def _class_cost(logits_MO: Tensor, own_MC: Tensor | None) -> Tensor:
    """Binary cross-entropy, summed over the classes, between y = sqrt(p_class * p_object) and one true class.

    With z = log(y / (1 - y)) it is sum_j softplus(z_j) - z_true, and softplus(z) = -log(1 - y): so all classes of a
    candidate are done once, whatever the number of targets that ask. Objectness is column 0. [M, C]
    """
    sure_MC = logits_MO[:, 1:].sigmoid().mul_(logits_MO[:, :1].sigmoid()).sqrt_()
    if own_MC is not None:
        sure_MC.mul_(own_MC)  # what a head does not answer for costs nothing, and no target asks for it
    unsure_MC = 1 - sure_MC
    nothing_true_M1 = -unsure_MC.log().sum(1, keepdim=True)
    return unsure_MC.div_(sure_MC).log_().add_(nothing_true_M1)
