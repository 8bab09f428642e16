"""Cells of the prediction maps by number: one number for each cell of a batch, over all layers.

Dimension key:  N entries (candidates or matches), layer after layer   O channels   L layers
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.yolo.loss.matches import Place
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
