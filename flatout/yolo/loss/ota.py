"""OTA: every target takes the cells that suit it best, as many as overlap it well, for a whole batch at once.

This is the path of plain torch operations (the CPU's); on a GPU `on_device.py` gives the same answer without a wait.

The targets of an image are rows, its candidates columns; a pair costs class error + 3 * (-ln IoU). A row takes its k
cheapest columns, k the sum of its largest overlaps. A column that several rows take goes to the row of the image
for which it is cheapest, even if that one had not taken it. Equal costs: the lower column, the lower row.

Images with about as many targets are padded to one size and done together, so a batch takes a few dozen operations,
and a crowd in one image costs the others nothing.

Dimension key:  T targets   M candidates   I images done together, with R rows and C columns each   Q contested columns

Cells of the prediction maps by number: one number for each cell of a batch, over all layers.

Dimension key:  N entries (candidates or matches), layer after layer   O channels   L layers
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.boxes import cxcywh_to_xyxy
from flatout.yolo.loss.matches import Anchors, Matches, Place, Search, pack_place, unpack_place
from flatout.yolo.multihead.joined_maps import JoinedMap

Maps = Tensor | JoinedMap
"""A prediction map [images, anchors, rows, columns, channels], or what looks like one."""


def cells_per_layer(maps: Sequence[Maps]) -> list[int]:
    """How many cells each map has, all images and anchors together."""
    return [each.shape[:4].numel() for each in maps]


def cell_number(maps: Sequence[Maps], image_N: Tensor, place: Place) -> Tensor:
    """The number of each entry's cell, int64 [N]: layer after layer, in the order of the maps' axes."""
    sizes = cells_per_layer(maps)
    begin_L, rows_L, columns_L = (
        torch.tensor(numbers, device=image_N.device)
        for numbers in (
            [sum(sizes[:layer]) for layer in range(len(maps))],
            [each.shape[2] for each in maps],
            [each.shape[3] for each in maps],
        )
    )
    num_anchors = maps[0].shape[1]
    line_N = (image_N * num_anchors + place.anchor) * rows_L[place.layer] + place.row
    return begin_L[place.layer] + line_N * columns_L[place.layer] + place.column


def split_by_layer(maps: Sequence[Maps], cell_N: Tensor, num_per_layer: Sequence[int]) -> list[Tensor]:
    """Cell numbers counted from the beginning of their own map, one tensor per layer."""
    parts, begin = [], 0
    for num_cells, cell_n in zip(cells_per_layer(maps), cell_N.split(list(num_per_layer)), strict=True):
        parts.append(cell_n - begin)
        begin += num_cells
    return parts


def gather_cells(maps: Sequence[Maps], cells: Sequence[Tensor]) -> Tensor:
    """All channels of cells given per layer, float32 [N, O]."""
    rows = [
        one_map.rows(cell_n) if isinstance(one_map, JoinedMap) else one_map.flatten(0, 3).index_select(0, cell_n)
        for one_map, cell_n in zip(maps, cells, strict=True)
    ]
    return torch.cat(rows).float()


def last_of_same_cell(cell_N: Tensor, num_cells: int) -> Tensor:
    """For each entry the index of the last entry with the same cell, int64 [N]."""
    # Only cells that are written are read, so the table is never cleared.
    last = torch.empty(num_cells, dtype=torch.int64, device=cell_N.device)
    last[cell_N] = -1
    last.scatter_reduce_(0, cell_N, torch.arange(len(cell_N), device=cell_N.device), "amax")
    return last[cell_N]


# Which cells may predict a target: those around its centre, at every anchor of similar size.
#
# YOLOv7's rule: the cell that holds the centre, and each neighbour nearer than `reach` cells. Plain torch; on a GPU
# the kernels of `kernels_assign.py` do the same without a wait.
#
# Dimension key:  T targets   L layers   A anchors   K kinds of cell: centre, left, up, right, down   M candidates

_SHIFTS = ((0, 0), (-1, 0), (0, -1), (1, 0), (0, 1))
"""Way from the centre to the point whose cell is taken, in units of `reach`; one per kind."""


def list_candidates(maps: Sequence[Maps], targets_T6: Tensor, anchors: Anchors, search: Search) -> Matches:
    """Every candidate with the target that brought it, layer after layer in list order: kind, anchor, target.

    A cell that several targets bring, or one target twice, is listed as often. Rows of `targets_T6` (image,
    class, centre and size relative to the image's) whose image is not in the batch are padding.
    """
    sides_L2 = torch.tensor([(each.shape[3], each.shape[2]) for each in maps], device=targets_T6.device)
    centre_LT2 = targets_T6[:, 2:4].float() * sides_L2[:, None]
    size_LT2 = targets_T6[:, 4:6].float() * sides_L2[:, None]
    image_T = image_of_targets(targets_T6, batch_size=maps[0].shape[0])
    fits_LAT = _fits_anchor(size_LT2, anchors.size_LA2, search.anchor_t)
    near_LKT = _has_neighbour(centre_LT2, sides_L2, search.reach)
    found_LKAT = near_LKT[:, :, None] & fits_LAT[:, None] & (image_T >= 0)
    layer_M, kind_M, anchor_M, target_M = torch.nonzero(found_LKAT, as_tuple=True)
    shift_K2 = search.reach * torch.tensor(_SHIFTS, device=targets_T6.device)
    cell_M2 = (centre_LT2[layer_M, target_M] + shift_K2[kind_M]).long()
    column_M, row_M = torch.minimum(cell_M2.clamp_(min=0), sides_L2[layer_M] - 1).unbind(1)
    return Matches(
        place_M=pack_place(layer_M, anchor_M, row_M, column_M),
        image_M=image_T[target_M],
        target_M=target_M.to(torch.int32),
    )


def image_of_targets(targets_T6: Tensor, *, batch_size: int) -> Tensor:
    """Image index of each target, int32 [T]; -1 for padding rows."""
    image_T = targets_T6[:, 0].to(torch.int32)
    return torch.where((targets_T6[:, 0] >= 0) & (image_T < batch_size), image_T, -1)


def _fits_anchor(size_LT2: Tensor, anchor_LA2: Tensor, anchor_t: float) -> Tensor:
    """Whether a target and an anchor are of similar size, bool [L, A, T]; the limit itself is too far."""
    ratio_LAT2 = size_LT2[:, None] / anchor_LA2.to(size_LT2)[:, :, None]
    return torch.maximum(ratio_LAT2, 1 / ratio_LAT2).amax(-1) < anchor_t


def _has_neighbour(centre_LT2: Tensor, sides_L2: Tensor, reach: float) -> Tensor:
    """Whether the cell of each kind exists and is near enough, bool [L, 5, T].

    On a cell's edge both sides count as near, though the farther one is the centre cell again: so in YOLOv7.
    """
    from_end_LT2 = sides_L2[:, None] - centre_LT2
    before_LT2, after_LT2 = ((way % 1 < reach) & (way > 1) for way in (centre_LT2, from_end_LT2))
    centre_LT1 = torch.ones_like(before_LT2[..., :1])
    return torch.cat((centre_LT1, before_LT2, after_LT2), 2).transpose(1, 2)


# What the network says at the candidate cells: the box it predicts there, and what each class would cost.
#
# Dimension key:  M candidates (the columns of the assignment)   C classes   L layers   A anchors


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


PAIRS_AT_ONCE = 1 << 24
"""Rows x columns looked at together, about 50 bytes each: a crowd is done in pieces."""

FEW_PAIRS = 1 << 17
"""So few padded pairs that sorting images by size costs more than it saves."""

OVERLAP_WEIGHT = 3.0
OVERLAP_FLOOR = 1e-8


class _Rows(NamedTuple):
    """The targets, each [T]."""

    corners_px: tuple[Tensor, Tensor, Tensor, Tensor]
    area_px: Tensor
    class_id: Tensor


class _Group(NamedTuple):
    """Rows and columns of images of similar size, padded; padding repeats some row or column and is not valid."""

    row_IR: Tensor
    row_valid_IR: Tensor
    column_IC: Tensor
    column_valid_IC: Tensor

    def pieces(self) -> Iterator["_Group"]:
        """Cut into groups of at most PAIRS_AT_ONCE pairs, if need be within an image."""
        (num_images, num_rows), num_columns = self.row_IR.shape, self.column_IC.shape[1]
        images = max(1, PAIRS_AT_ONCE // (num_rows * num_columns))
        rows = num_rows if images > 1 else max(1, PAIRS_AT_ONCE // num_columns)
        for i in range(0, num_images, images):
            column_IC, column_valid_IC = self.column_IC[i : i + images], self.column_valid_IC[i : i + images]
            for r in range(0, num_rows, rows):
                row_IR, row_valid_IR = (each[i : i + images, r : r + rows] for each in self[:2])
                yield _Group(row_IR, row_valid_IR, column_IC, column_valid_IC)


@torch.no_grad()
def torch_assign_ota(
    maps: Sequence[Maps], targets_T6: Tensor, anchors: Anchors, search: Search, own_HP: Tensor | None = None
) -> Matches:
    """Match lists of the whole batch, images ascending, in each the columns in list order; `own_HP` as in heads.py."""
    candidates = list_candidates(maps, targets_T6, anchors, search)
    columns = read_columns(maps, candidates, anchors, own_HP)
    image_T = image_of_targets(targets_T6, batch_size=maps[0].shape[0])
    rows = _read_rows(targets_T6, height_px=round(maps[0].shape[2] * anchors.strides_px[0]))
    num_takers_M = torch.zeros_like(candidates.target_M)
    owner_M = torch.full_like(candidates.target_M, -1)
    num_taken_T = torch.zeros_like(image_T)
    by_image_M = torch.argsort(candidates.image_M, stable=True)
    for group in _groups(image_T, candidates.image_M, by_image_M, num_images=maps[0].shape[0]):
        for piece in group.pieces():
            _take(piece, rows, columns, search.top, num_taken_T, num_takers_M, owner_M)
        _settle_contested(group, rows, columns, num_takers_M, owner_M)
    kept_N = by_image_M[owner_M[by_image_M] >= 0]
    return Matches(candidates.place_M[kept_N], candidates.image_M[kept_N], owner_M[kept_N], num_taken_T)


def _read_rows(targets_T6: Tensor, *, height_px: int) -> _Rows:
    # YOLOv7 scales x and w by the height too, which is wrong for inputs that are not square, and kept.
    x1, y1, x2, y2 = cxcywh_to_xyxy(targets_T6[:, 2:6].float() * height_px).unbind(1)
    return _Rows((x1, y1, x2, y2), (x2 - x1) * (y2 - y1), targets_T6[:, 1].long())


def _groups(image_T: Tensor, image_M: Tensor, by_image_M: Tensor, *, num_images: int) -> Iterator[_Group]:
    """Images that have rows and columns, in groups of similar numbers of rows."""
    real_T = image_T >= 0
    by_image_T = torch.argsort(torch.where(real_T, image_T, num_images), stable=True)
    num_rows_B = torch.bincount(image_T[real_T], minlength=num_images)
    num_columns_B = torch.bincount(image_M, minlength=num_images)
    first_row_B, first_column_B = num_rows_B.cumsum(0) - num_rows_B, num_columns_B.cumsum(0) - num_columns_B
    for image_I in _similar_images(num_rows_B, num_columns_B):
        row_IR, row_valid_IR = _padded(first_row_B[image_I], num_rows_B[image_I])
        column_IC, column_valid_IC = _padded(first_column_B[image_I], num_columns_B[image_I])
        yield _Group(by_image_T[row_IR], row_valid_IR, by_image_M[column_IC], column_valid_IC)


def _similar_images(num_rows_B: Tensor, num_columns_B: Tensor) -> Iterator[Tensor]:
    """Image indices in groups: one group if that pads little, otherwise one for each power of two of rows."""
    (busy_I,) = torch.nonzero(num_rows_B * num_columns_B, as_tuple=True)
    if not len(busy_I):
        return
    rows_I, columns_I = num_rows_B[busy_I], num_columns_B[busy_I]
    padded = int(rows_I.max() * columns_I.max()) * len(busy_I)
    if padded <= max(FEW_PAIRS, 2 * int((rows_I * columns_I).sum())):
        yield busy_I
        return
    power_I = (rows_I - 1).clamp_(min=1).log2().long()
    for power in torch.unique(power_I).tolist():
        yield busy_I[power_I == power]


def _padded(first_I: Tensor, num_I: Tensor) -> tuple[Tensor, Tensor]:
    """Positions first, first + 1, ... of each image, up to the largest number [I, N], and which of them are its own."""
    step_N = torch.arange(int(num_I.max()), device=num_I.device)
    valid_IN = step_N < num_I[:, None]
    return first_I[:, None] + torch.where(valid_IN, step_N, 0), valid_IN


def _take(
    group: _Group,
    rows: _Rows,
    columns: Columns,
    top: int,
    num_taken_T: Tensor,
    num_takers_M: Tensor,
    owner_M: Tensor,
) -> None:
    """Every row takes its k cheapest columns: count the takers of a column, and note one of them."""
    column_I1C = group.column_IC[:, None]
    iou_IRC = _iou(rows, group.row_IR[..., None], columns, column_I1C)
    cost_IRC = _cost(iou_IRC, rows, group.row_IR[..., None], columns, column_I1C)
    top = min(top, column_I1C.shape[2])
    iou_IRC.mul_(group.column_valid_IC[:, None])
    k_IR = iou_IRC.topk(top, 2).values.sum(2).int().clamp_(min=1).mul_(group.row_valid_IR)
    num_taken_T.index_put_((group.row_IR[group.row_valid_IR],), k_IR[group.row_valid_IR])
    cheapest_IRK = _cheapest(cost_IRC, group.column_valid_IC, top)
    taken_IRK = torch.arange(top, device=k_IR.device) < k_IR[..., None]
    image_N, row_N, _ = torch.nonzero(taken_IRK, as_tuple=True)
    column_N = group.column_IC[image_N, cheapest_IRK[taken_IRK]]
    num_takers_M.index_add_(0, column_N, torch.ones_like(column_N, dtype=torch.int32))
    # Where several take a column, any of them may stand here: _settle_contested decides.
    owner_M[column_N] = group.row_IR[image_N, row_N].to(torch.int32)


def _cheapest(cost_IRC: Tensor, column_valid_IC: Tensor, top: int) -> Tensor:
    """Positions of each row's `top` cheapest columns, cheapest first, of equals the lower: int64 [I, R, K]."""
    # The bits of non-negative floats order like the floats; the position below them makes every key different.
    key_IRC = cost_IRC.view(torch.int32).long() << 32
    key_IRC |= torch.arange(cost_IRC.shape[2], device=cost_IRC.device)
    key_IRC.masked_fill_(~column_valid_IC[:, None], torch.iinfo(torch.int64).max)
    return key_IRC.topk(top, 2, largest=False).values & 0xFFFFFFFF


def _settle_contested(group: _Group, rows: _Rows, columns: Columns, num_takers_M: Tensor, owner_M: Tensor) -> None:
    """A column with several takers goes to the row of its image for which it is cheapest."""
    contested_IC = (num_takers_M[group.column_IC] > 1) & group.column_valid_IC
    image_Q, position_Q = torch.nonzero(contested_IC, as_tuple=True)
    at_once = max(1, PAIRS_AT_ONCE // group.row_IR.shape[1])
    for image_q, position_q in zip(image_Q.split(at_once), position_Q.split(at_once), strict=True):
        row_QR, column_Q1 = group.row_IR[image_q], group.column_IC[image_q, position_q][:, None]
        cost_QR = _cost(_iou(rows, row_QR, columns, column_Q1), rows, row_QR, columns, column_Q1)
        cost_QR.masked_fill_(~group.row_valid_IR[image_q], torch.inf)
        cheapest_Q1 = cost_QR.argmin(1, keepdim=True)  # the first of equals
        owner_M[column_Q1[:, 0]] = row_QR.gather(1, cheapest_Q1)[:, 0].to(torch.int32)


def _iou(rows: _Rows, row: Tensor, columns: Columns, column: Tensor) -> Tensor:
    """Overlap of rows and columns, broadcast against each other; no epsilon."""
    (x1, y1, x2, y2), (p1, q1, p2, q2) = rows.corners_px, columns.corners_px
    inter = torch.minimum(x2[row], p2[column]).sub_(torch.maximum(x1[row], p1[column])).clamp_(min=0)
    inter.mul_(torch.minimum(y2[row], q2[column]).sub_(torch.maximum(y1[row], q1[column])).clamp_(min=0))
    union = (rows.area_px[row] + columns.area_px[column]).sub_(inter)
    return inter.div_(union).nan_to_num_(nan=0.0)


def _cost(iou: Tensor, rows: _Rows, row: Tensor, columns: Columns, column: Tensor) -> Tensor:
    """Cost of every pair, float32, at least 0; what is not finite is worse than everything."""
    cost = columns.class_cost.take(columns.class_row[column] + rows.class_id[row])
    # In float64, and rounded once: a float32 logarithm may round equal inputs differently.
    overlap = iou.double().add_(OVERLAP_FLOOR).log_().mul_(-OVERLAP_WEIGHT)
    return overlap.add_(cost).float().nan_to_num_(nan=torch.inf, posinf=torch.inf).clamp_(min=0)
