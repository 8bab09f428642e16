"""The joined map of several heads, in the shape of a map of images: for torch operations that read some of its cells.

Dimension key:  B pictures   H heads   V = B * H images   A anchors   Y, X rows and columns   N channels of the map
                O = 5 + most classes a head predicts   n cells
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.yolo.assign.heads import Heads
from flatout.yolo.assign.layer_table import without_waiting
from flatout.yolo.assign.matches import Anchors
from flatout.yolo.model.joined_order import channels_of_planes


@dataclass(frozen=True)
class JoinedMap:
    """A view that knows where the cells of every image are; nothing is copied until cells are read."""

    values_BNYX: Tensor
    heads: Heads
    num_anchors: int

    @property
    def shape(self) -> torch.Size:
        """[V, A, Y, X, O], as if every image had a map of its own."""
        batch, _, rows, columns = self.values_BNYX.shape
        outputs = 5 + self.heads.own_HP.shape[1]
        return torch.Size((batch * self.heads.num, self.num_anchors, rows, columns, outputs))

    @property
    def device(self) -> torch.device:
        return self.values_BNYX.device

    def index_of(self, cell_n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where the outputs of cells are in the values, [n, O] when broadcast; `cell_n` numbers them as `shape` does.

        A head with fewer classes than others has its last one in the rest: they count for nothing.
        """
        _, num_anchors, rows, columns, num_outputs = self.shape
        image_n = cell_n // (num_anchors * rows * columns)
        plane_n = image_n % self.heads.num * num_anchors + cell_n // (rows * columns) % num_anchors
        channel_nO = _channels(self.heads.groups.outputs_H, self.num_anchors, num_outputs, self.device)[plane_n]
        row_n, column_n = cell_n // columns % rows, cell_n % columns
        return (image_n // self.heads.num)[:, None], channel_nO, row_n[:, None], column_n[:, None]

    def rows(self, cell_n: Tensor) -> Tensor:
        """All outputs of cells, [n, O]."""
        return self.values_BNYX[self.index_of(cell_n)]

    def objectness(self, values_BNYX: Tensor) -> Tensor:
        """Of all images, [B, H * A, Y, X]: a view."""
        return values_BNYX[:, -self.heads.num * self.num_anchors :]


@functools.lru_cache(maxsize=64)
def _channels(outputs_H: tuple[int, ...], num_anchors: int, num_outputs: int, device: torch.device) -> Tensor:
    """int64 [H * A, O]: the channels of every head and anchor; the first call copies them to the device."""
    planes = channels_of_planes(outputs_H, num_anchors)
    return without_waiting(torch.tensor([[*p, *[p[-1]] * (num_outputs - len(p))] for p in planes]), device)


def as_images(maps: Sequence[Tensor], heads: Heads | None, anchors: Anchors) -> Sequence[Tensor] | Sequence[JoinedMap]:
    """Maps of images: joined ones as views, those of a single head as they are."""
    return maps if heads is None else [JoinedMap(each, heads, anchors.size_LA2.shape[1]) for each in maps]
