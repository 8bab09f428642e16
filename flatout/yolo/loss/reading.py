"""Read prediction maps where the loss looks, and write the gradient back in one pass.

The loss needs all channels of a few matched cells and one channel, objectness, of all cells. Indexing a map twice
would make autograd build two gradients of the map's size and add them; here there is one, written once.

Dimension key:  N matches   O channels, 5 + classes   S cells of all layers   L layers
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.yolo.assign.cells import cell_number, gather_cells, split_by_layer
from flatout.yolo.assign.matches import Matches, Place, unpack_place

OBJECTNESS = 4


class Entries(NamedTuple):
    """Matches layer after layer, without empty slots; int64 [N] each."""

    place: Place
    cell: Tensor
    target: Tensor
    num_per_layer: list[int]


def sort_by_layer(maps: Sequence[Tensor], matches: Matches) -> Entries:
    """Matches in list order, layer after layer. Asks the device for their number."""
    place, num_layers = unpack_place(matches.place_M), len(maps)
    layer_M = torch.where(matches.target_M >= 0, place.layer, num_layers)
    num_per_layer = torch.bincount(layer_M, minlength=num_layers)[:num_layers].tolist()
    order_N = torch.argsort(layer_M, stable=True)[: sum(num_per_layer)]
    place = Place(*(each[order_N] for each in place))
    cell_N = cell_number(maps, matches.image_M[order_N].long(), place)
    return Entries(place, cell_N, matches.target_M[order_N].long(), num_per_layer)


def read_cells(maps: Sequence[Tensor], entries: Entries) -> tuple[Tensor, Tensor]:
    """All channels of the matched cells [N, O], and the objectness logits of all cells [S]; float32."""
    cells = split_by_layer(maps, entries.cell, entries.num_per_layer)
    logits_NO, objectness_S = _ReadCells.apply(cells, *maps)
    return logits_NO, objectness_S


class _ReadCells(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cells: list[Tensor], *maps: Tensor) -> tuple[Tensor, Tensor]:
        ctx.cells = cells
        ctx.kinds = [(each.shape, each.dtype) for each in maps]
        objectness = [one_map[..., OBJECTNESS].reshape(-1) for one_map in maps]
        return gather_cells(maps, cells), torch.cat(objectness).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits_NO: Tensor, grad_objectness_S: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None]
        logits = grad_logits_NO.split([len(cell_n) for cell_n in ctx.cells])
        objectness = grad_objectness_S.split([shape[:4].numel() for shape, _ in ctx.kinds])
        for (shape, dtype), cell_n, grad_nO, grad_s in zip(ctx.kinds, ctx.cells, logits, objectness, strict=True):
            grad = torch.zeros(shape, dtype=dtype, device=grad_s.device)
            grad[..., OBJECTNESS] = grad_s.view(shape[:4])
            grad.view(-1, shape[4]).index_add_(0, cell_n, grad_nO.to(dtype))
            grads.append(grad)
        return tuple(grads)
