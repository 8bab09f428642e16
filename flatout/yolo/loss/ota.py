"""OTA assignment by torch operations: each target takes its cheapest cells, for a whole batch at once.

    list_candidates --> read_columns (predictions at the candidates) --> torch_assign_ota --> Matches

This is the path for CPUs; on a GPU the kernels of on_device.py give the same matches without making the host wait.

The targets of an image are rows, its candidates columns; a pair costs class error + 3 * (-ln IoU). A row takes its k
cheapest columns; k is the sum of its largest overlaps. A column that several rows take goes to the row of the image for
which it is cheapest, even if that row did not take it. For equal costs the lower column and the lower row win.

Images with similar numbers of targets are padded to one size and processed together, so that a batch takes a few dozen
operations, and a crowd in one image does not slow down the others.

Dimension key:  T targets   M candidates   L layers   A anchors   K offsets of cells: centre, left, up, right, down
                O channels   B images   H heads   P most classes of a head
                I images processed together, each with R rows and C columns, of which a row takes up to K
                Q contested columns   N entries (candidates or matches), sorted by layer   n entries of one layer
                In class costs, [M, C], C is classes
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.boxes import cxcywh_to_xyxy
from flatout.yolo.loss.matches import Anchors, Cell, Matches, Search, pack_cells, unpack_cells
from flatout.yolo.multihead.joined_maps import JoinedMap

Maps = Tensor | JoinedMap
"""A prediction map [images, anchors, rows, columns, channels], or a view with that shape."""


# Candidates: the cells around a target's centre, at every anchor of similar size
#
# YOLOv7's rule: the cell that contains the centre, and each neighbour closer than `reach` cells.

_OFFSETS = ((0, 0), (-1, 0), (0, -1), (1, 0), (0, 1))
"""From the target's centre to a point in the candidate cell, in units of `reach`."""


def list_candidates(maps: Sequence[Maps], targets_T6: Tensor, anchors: Anchors, search: Search) -> Matches:
    """Every candidate with its target, sorted by layer, then in list order: by offset, anchor and target.

    A cell that is a candidate for several targets, or twice for one, is listed each time. Rows of `targets_T6` (image,
    class, centre and size relative to the image) whose image is not in the batch are padding.
    """
    sides_L2 = torch.tensor([(each.shape[3], each.shape[2]) for each in maps], device=targets_T6.device)
    centre_LT2 = targets_T6[:, 2:4].float() * sides_L2[:, None]
    size_LT2 = targets_T6[:, 4:6].float() * sides_L2[:, None]
    image_T = image_of_targets(targets_T6, batch_size=maps[0].shape[0])
    fits_LAT = _fits_anchor(size_LT2, anchors.size_LA2, search.anchor_t)
    near_LKT = _has_neighbour(centre_LT2, sides_L2, search.reach)
    found_LKAT = near_LKT[:, :, None] & fits_LAT[:, None] & (image_T >= 0)
    layer_M, offset_M, anchor_M, target_M = torch.nonzero(found_LKAT, as_tuple=True)
    offset_K2 = search.reach * torch.tensor(_OFFSETS, device=targets_T6.device)
    cell_M2 = (centre_LT2[layer_M, target_M] + offset_K2[offset_M]).long()
    column_M, row_M = torch.minimum(cell_M2.clamp_(min=0), sides_L2[layer_M] - 1).unbind(1)
    return Matches(
        packed_M=pack_cells(layer_M, anchor_M, row_M, column_M),
        image_M=image_T[target_M],
        target_M=target_M.to(torch.int32),
    )


def image_of_targets(targets_T6: Tensor, *, batch_size: int) -> Tensor:
    """Image index of each target, int32 [T]; -1 for padding rows."""
    image_T = targets_T6[:, 0].to(torch.int32)
    return torch.where((targets_T6[:, 0] >= 0) & (image_T < batch_size), image_T, -1)


def _fits_anchor(size_LT2: Tensor, anchor_LA2: Tensor, anchor_t: float) -> Tensor:
    """Whether a target and an anchor are of similar size, bool [L, A, T]; a ratio equal to `anchor_t` does not fit."""
    ratio_LAT2 = size_LT2[:, None] / anchor_LA2.to(size_LT2)[:, :, None]
    return torch.maximum(ratio_LAT2, 1 / ratio_LAT2).amax(-1) < anchor_t


def _has_neighbour(centre_LT2: Tensor, sides_L2: Tensor, reach: float) -> Tensor:
    """Whether the cell at each offset exists and is close enough, bool [L, 5, T].

    For a centre on a cell's edge both sides count as close, although one of them is the centre cell: so in YOLOv7.
    """
    from_end_LT2 = sides_L2[:, None] - centre_LT2
    before_LT2, after_LT2 = ((distance % 1 < reach) & (distance > 1) for distance in (centre_LT2, from_end_LT2))
    centre_LT1 = torch.ones_like(before_LT2[..., :1])
    return torch.cat((centre_LT1, before_LT2, after_LT2), 2).transpose(1, 2)


# Predictions at the candidates: the boxes, and the cost of each class


class Columns(NamedTuple):
    """Predictions at the candidates; bit-identical for candidates of the same cell, so that they tie exactly."""

    corners_px: tuple[Tensor, Tensor, Tensor, Tensor]
    """x1, y1, x2, y2, each float32 [M]."""

    area_px: Tensor
    class_cost: Tensor
    """Flat float32: the class part of the cost of candidate m for a target of class c is at class_row[m] + c."""

    class_row: Tensor
    """int64 [M]: where the class costs of a candidate begin."""


def read_columns(maps: Sequence[Maps], candidates: Matches, anchors: Anchors, own_HP: Tensor | None = None) -> Columns:
    """Predictions at the candidates, in float32. `own_HP` marks the class outputs that count, per head."""
    cell = unpack_cells(candidates.packed_M)
    image_M = candidates.image_M.long()
    index_M = flat_index(maps, image_M, cell)
    num_per_layer = torch.bincount(cell.layer, minlength=len(maps)).tolist()
    logits_MO = gather_cells(maps, split_by_layer(maps, index_M, num_per_layer))
    # All candidates of a cell use the numbers of its last one: vectorised functions may round the same input
    # differently at the end of an array, and a difference in the last bit would decide instead of the column's index.
    last_M = last_of_same_cell(index_M, sum(cells_per_layer(maps)))
    box_xyxy_M4 = _decode_px(logits_MO[:, :4], cell, anchors)[last_M]
    x1, y1, x2, y2 = (each.contiguous() for each in box_xyxy_M4.unbind(1))
    own_MC = None if own_HP is None else own_HP[image_M % len(own_HP)]
    class_cost_MC = _class_cost(logits_MO[:, 4:], own_MC)
    return Columns(
        corners_px=(x1, y1, x2, y2),
        area_px=(x2 - x1) * (y2 - y1),
        class_cost=class_cost_MC.view(-1),
        class_row=last_M * class_cost_MC.shape[1],
    )


def _decode_px(logits_M4: Tensor, cell: Cell, anchors: Anchors) -> Tensor:
    """Predicted boxes as corners in pixels of the network input, [M, 4]."""
    stride_M = logits_M4.new_tensor(anchors.strides_px)[cell.layer][:, None]
    doubled_M4 = 2 * logits_M4.sigmoid()
    corner_M2 = torch.stack((cell.column, cell.row), 1)
    centre_M2 = (doubled_M4[:, :2] - 0.5 + corner_M2) * stride_M
    half_M2 = doubled_M4[:, 2:].square() * anchors.size_LA2[cell.layer, cell.anchor] * (stride_M / 2)
    return torch.cat((centre_M2 - half_M2, centre_M2 + half_M2), 1)


def _class_cost(logits_MO: Tensor, own_MC: Tensor | None) -> Tensor:
    """Binary cross-entropy, summed over the classes, between y = sqrt(p_class * p_object) and one true class.

    With z = log(y / (1 - y)) it is sum_j softplus(z_j) - z_true, and softplus(z) = -log(1 - y). So all classes of a
    candidate are computed once, for any number of targets. Objectness is column 0. [M, C]
    """
    prob_MC = logits_MO[:, 1:].sigmoid().mul_(logits_MO[:, :1].sigmoid()).sqrt_()
    if own_MC is not None:
        prob_MC.mul_(own_MC)  # classes of other heads cost nothing, and no target of this head has them
    complement_MC = 1 - prob_MC
    no_class_M1 = -complement_MC.log().sum(1, keepdim=True)
    return complement_MC.div_(prob_MC).log_().add_(no_class_M1)


# Assignment

PAIRS_AT_ONCE = 1 << 24
"""Most pairs of rows and columns processed together, about 50 bytes each; a crowd is processed in chunks."""

FEW_PAIRS = 1 << 17
"""Up to this many padded pairs, grouping images by size costs more than it saves."""

OVERLAP_WEIGHT = 3.0
OVERLAP_FLOOR = 1e-8


class _Rows(NamedTuple):
    """Boxes and classes of the targets, each [T]."""

    corners_px: tuple[Tensor, Tensor, Tensor, Tensor]
    area_px: Tensor
    class_id: Tensor


class _Group(NamedTuple):
    """Rows and columns of images of similar size, padded; padding repeats a row or column and is marked invalid."""

    row_IR: Tensor
    row_valid_IR: Tensor
    column_IC: Tensor
    column_valid_IC: Tensor

    def chunks(self) -> Iterator["_Group"]:
        """Groups of at most PAIRS_AT_ONCE pairs; an image is divided if necessary."""
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
    """Matches of the whole batch, sorted by image, in each image in list order; `own_HP` as in `joined_maps.Heads`."""
    candidates = list_candidates(maps, targets_T6, anchors, search)
    columns = read_columns(maps, candidates, anchors, own_HP)
    image_T = image_of_targets(targets_T6, batch_size=maps[0].shape[0])
    rows = _read_rows(targets_T6, height_px=round(maps[0].shape[2] * anchors.strides_px[0]))
    num_takers_M = torch.zeros_like(candidates.target_M)
    owner_M = torch.full_like(candidates.target_M, -1)
    num_taken_T = torch.zeros_like(image_T)
    by_image_M = torch.argsort(candidates.image_M, stable=True)
    for group in _groups(image_T, candidates.image_M, by_image_M, num_images=maps[0].shape[0]):
        for chunk in group.chunks():
            _take(chunk, rows, columns, search.top, num_taken_T, num_takers_M, owner_M)
        _settle_contested(group, rows, columns, num_takers_M, owner_M)
    kept_N = by_image_M[owner_M[by_image_M] >= 0]
    return Matches(candidates.packed_M[kept_N], candidates.image_M[kept_N], owner_M[kept_N], num_taken_T)


@torch.no_grad()
def match_costs(
    maps: Sequence[Maps], targets_T6: Tensor, matches: Matches, anchors: Anchors, own_HP: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """IoU and cost of each match, float32 [M] each, for matches that are sorted by layer; for inspection."""
    columns = read_columns(maps, matches, anchors, own_HP)
    rows = _read_rows(targets_T6, height_px=round(maps[0].shape[2] * anchors.strides_px[0]))
    row_M, column_M = matches.target_M.long(), torch.arange(len(matches.target_M), device=targets_T6.device)
    iou_M = _iou(rows, row_M, columns, column_M)
    return iou_M, _cost(iou_M, rows, row_M, columns, column_M)


def _read_rows(targets_T6: Tensor, *, height_px: int) -> _Rows:
    # YOLOv7 scales x and w by the height too. That is wrong for inputs that are not square, but kept for equal results.
    x1, y1, x2, y2 = cxcywh_to_xyxy(targets_T6[:, 2:6].float() * height_px).unbind(1)
    return _Rows((x1, y1, x2, y2), (x2 - x1) * (y2 - y1), targets_T6[:, 1].long())


def _groups(image_T: Tensor, image_M: Tensor, by_image_M: Tensor, *, num_images: int) -> Iterator[_Group]:
    """Images with rows and columns, in groups of similar numbers of rows."""
    real_T = image_T >= 0
    by_image_T = torch.argsort(torch.where(real_T, image_T, num_images), stable=True)
    num_rows_B = torch.bincount(image_T[real_T], minlength=num_images)
    num_columns_B = torch.bincount(image_M, minlength=num_images)
    first_row_B, first_column_B = num_rows_B.cumsum(0) - num_rows_B, num_columns_B.cumsum(0) - num_columns_B
    for image_I in _similar_images(num_rows_B, num_columns_B):
        row_IR, row_valid_IR = _padded_positions(first_row_B[image_I], num_rows_B[image_I])
        column_IC, column_valid_IC = _padded_positions(first_column_B[image_I], num_columns_B[image_I])
        yield _Group(by_image_T[row_IR], row_valid_IR, by_image_M[column_IC], column_valid_IC)


def _similar_images(num_rows_B: Tensor, num_columns_B: Tensor) -> Iterator[Tensor]:
    """Image indices in groups: a single group if that needs little padding, else one per power of two of rows."""
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


def _padded_positions(first_I: Tensor, num_I: Tensor) -> tuple[Tensor, Tensor]:
    """Positions first, first + 1, ... of each image, padded to the largest number [I, N], and which are valid."""
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
    """Every row takes its k cheapest columns: count the takers of each column, and store one of them as its owner."""
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
    # If several rows take a column, any of them may be stored here: _settle_contested decides.
    owner_M[column_N] = group.row_IR[image_N, row_N].to(torch.int32)


def _cheapest(cost_IRC: Tensor, column_valid_IC: Tensor, top: int) -> Tensor:
    """Positions of each row's `top` cheapest columns, int64 [I, R, K], by cost and then by position."""
    # The bits of non-negative floats sort like the floats; the position in the low bits makes every key unique.
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
    """IoU of rows and columns, broadcast against each other; without an epsilon."""
    (x1, y1, x2, y2), (p1, q1, p2, q2) = rows.corners_px, columns.corners_px
    inter = torch.minimum(x2[row], p2[column]).sub_(torch.maximum(x1[row], p1[column])).clamp_(min=0)
    inter.mul_(torch.minimum(y2[row], q2[column]).sub_(torch.maximum(y1[row], q1[column])).clamp_(min=0))
    union = (rows.area_px[row] + columns.area_px[column]).sub_(inter)
    return inter.div_(union).nan_to_num_(nan=0.0)


def _cost(iou: Tensor, rows: _Rows, row: Tensor, columns: Columns, column: Tensor) -> Tensor:
    """Cost of every pair, float32, at least 0; infinite if it is not finite."""
    cost = columns.class_cost.take(columns.class_row[column] + rows.class_id[row])
    # In float64 and rounded once, because a float32 logarithm may round equal inputs differently.
    overlap = iou.double().add_(OVERLAP_FLOOR).log_().mul_(-OVERLAP_WEIGHT)
    return overlap.add_(cost).float().nan_to_num_(nan=torch.inf, posinf=torch.inf).clamp_(min=0)


# Flat indices of cells: one number for each cell of a batch, over all layers


def cells_per_layer(maps: Sequence[Maps]) -> list[int]:
    """Number of cells in each map, over all images and anchors."""
    return [each.shape[:4].numel() for each in maps]


def flat_index(maps: Sequence[Maps], image_N: Tensor, cell: Cell) -> Tensor:
    """Flat index of each cell, int64 [N]: layer by layer, in the order of the maps' axes."""
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
    line_N = (image_N * num_anchors + cell.anchor) * rows_L[cell.layer] + cell.row
    return begin_L[cell.layer] + line_N * columns_L[cell.layer] + cell.column


def split_by_layer(maps: Sequence[Maps], index_N: Tensor, num_per_layer: Sequence[int]) -> list[Tensor]:
    """Flat indices relative to the beginning of their own map, one tensor per layer."""
    parts, begin = [], 0
    for num_cells, index_n in zip(cells_per_layer(maps), index_N.split(list(num_per_layer)), strict=True):
        parts.append(index_n - begin)
        begin += num_cells
    return parts


def gather_cells(maps: Sequence[Maps], indices: Sequence[Tensor]) -> Tensor:
    """All channels of cells, whose flat indices are given per layer; float32 [N, O]."""
    rows = [
        one_map.rows(index_n) if isinstance(one_map, JoinedMap) else one_map.flatten(0, 3).index_select(0, index_n)
        for one_map, index_n in zip(maps, indices, strict=True)
    ]
    return torch.cat(rows).float()


def last_of_same_cell(index_N: Tensor, num_cells: int) -> Tensor:
    """For each entry, the position of the last entry with the same cell, int64 [N]."""
    # Only cells that are written are read, so the table need not be cleared.
    last = torch.empty(num_cells, dtype=torch.int64, device=index_N.device)
    last[index_N] = -1
    last.scatter_reduce_(0, index_N, torch.arange(len(index_N), device=index_N.device), "amax")
    return last[index_N]
