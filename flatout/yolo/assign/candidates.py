"""Which cells may predict a target: those around its centre, at every anchor of similar size.

YOLOv7's rule: the cell that holds the centre, and each neighbour nearer than `reach` cells. Plain torch; on a GPU
the kernels of `kernels_columns.py` do the same without a wait.

Dimension key:  T targets   L layers   A anchors   K kinds of cell: centre, left, up, right, down   M candidates
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.yolo.assign.cells import Maps
from flatout.yolo.assign.matches import Anchors, Matches, Search, pack_place

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
