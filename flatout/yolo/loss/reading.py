"""Read prediction maps where the loss looks, and write the gradient back in one pass.

The loss needs all channels of a few matched cells and one channel, objectness, of all cells. Indexing a map twice
would make autograd build two gradients of the map's size and add them; here there is one, written once.

Dimension key:  N matches   O channels, 5 + classes   S cells of all layers   L layers
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.yolo.assign.cells import Maps, cell_number, gather_cells, split_by_layer
from flatout.yolo.assign.joined_map import JoinedMap
from flatout.yolo.assign.matches import Matches, Place, unpack_place
from flatout.yolo.model.joined_order import OBJECTNESS


class Entries(NamedTuple):
    """Matches layer after layer, without empty slots; int64 [N] each."""

    place: Place
    image: Tensor
    cell: Tensor
    target: Tensor
    num_per_layer: list[int]


def sort_by_layer(maps: Sequence[Maps], matches: Matches) -> Entries:
    """Matches in list order, layer after layer. Asks the device for their number."""
    place, num_layers = unpack_place(matches.place_M), len(maps)
    layer_M = torch.where(matches.target_M >= 0, place.layer, num_layers)
    num_per_layer = torch.bincount(layer_M, minlength=num_layers)[:num_layers].tolist()
    order_N = torch.argsort(layer_M, stable=True)[: sum(num_per_layer)]
    place = Place(*(each[order_N] for each in place))
    image_N = matches.image_M[order_N].long()
    cell_N = cell_number(maps, image_N, place)
    return Entries(place, image_N, cell_N, matches.target_M[order_N].long(), num_per_layer)


def read_cells(maps: Sequence[Maps], entries: Entries) -> tuple[Tensor, Tensor]:
    """All channels of the matched cells [N, O], and the objectness logits of all cells [S]; float32."""
    cells = split_by_layer(maps, entries.cell, entries.num_per_layer)
    values = [one_map.values_BNYX if isinstance(one_map, JoinedMap) else one_map for one_map in maps]
    logits_NO, objectness_S = _ReadCells.apply(cells, maps, *values)
    return logits_NO, objectness_S


class _ReadCells(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cells: list[Tensor], maps: Sequence[Maps], *values: Tensor) -> tuple[Tensor, Tensor]:
        ctx.cells = cells
        # Where things are is all that the gradient needs: of maps of a single head their shapes, not their values.
        ctx.places = [
            _InJoined(one_map) if isinstance(one_map, JoinedMap) else _InMap(one_map.shape) for one_map in maps
        ]
        ctx.kinds = [(each.shape, each.dtype) for each in values]
        objectness = [place.objectness(each).reshape(-1) for place, each in zip(ctx.places, values, strict=True)]
        return gather_cells(maps, cells), torch.cat(objectness).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits_NO: Tensor, grad_objectness_S: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None, None]
        logits = grad_logits_NO.split([len(cell_n) for cell_n in ctx.cells])
        objectness = grad_objectness_S.split([place.num_cells for place in ctx.places])
        for (shape, dtype), place, cell_n, grad_nO, grad_s in zip(
            ctx.kinds, ctx.places, ctx.cells, logits, objectness, strict=True
        ):
            grad = torch.zeros(shape, dtype=dtype, device=grad_s.device)
            place.write(grad, cell_n, grad_nO.to(dtype), grad_s.to(dtype))
            grads.append(grad)
        return tuple(grads)


class _InMap:
    """Where cells are in the map of a single head, [images, anchors, rows, columns, channels]."""

    def __init__(self, shape: torch.Size) -> None:
        self.num_cells = shape[:4].numel()

    def objectness(self, values: Tensor) -> Tensor:
        return values[..., OBJECTNESS]

    def write(self, grad: Tensor, cell_n: Tensor, grad_nO: Tensor, grad_s: Tensor) -> None:
        grad[..., OBJECTNESS] = grad_s.view(grad.shape[:4])
        grad.view(-1, grad.shape[4]).index_add_(0, cell_n, grad_nO)


class _InJoined:
    """Where the cells of images are in a joined map, [pictures, channels, rows, columns]."""

    def __init__(self, joined: JoinedMap) -> None:
        # Without the values: the map is not kept for the backward pass.
        values = joined.values_BNYX.new_empty(()).expand(joined.values_BNYX.shape)
        self._joined = replace(joined, values_BNYX=values)
        self.num_cells = joined.shape[:4].numel()

    def objectness(self, values: Tensor) -> Tensor:
        return self._joined.objectness(values)

    def write(self, grad: Tensor, cell_n: Tensor, grad_nO: Tensor, grad_s: Tensor) -> None:
        objectness = self._joined.objectness(grad)
        objectness.copy_(grad_s.view(objectness.shape))
        grad.index_put_(self._joined.index_of(cell_n), grad_nO, accumulate=True)
