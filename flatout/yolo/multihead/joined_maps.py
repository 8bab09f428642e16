"""Several heads as one: every (picture, head) counts as an image, and a target is there for its own head only.

So one assignment and one loss do the work for all heads. Cells are read in the joined maps [B, N, Y, X] of
MultiHeadDetect, where they are: by the GPU's kernels, or by torch operations through `JoinedMap`.

Dimension key:  B pictures   H heads   V = B * H images, of picture b and head h number b * H + h   T targets
                C classes of the data set   P most classes a head predicts
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.yolo.loss.kernel_support import copy_async
from flatout.yolo.multihead.head_config import HeadConfig, channels_of_planes


class Heads(NamedTuple):
    """What assignment and loss know about several heads; the tensors are constants on the device of the maps."""

    groups: HeadConfig
    head_C: Tensor
    """int64: the head of every class."""
    column_C: Tensor
    """int64: its place among the class outputs of that head."""
    own_HP: Tensor
    """float32, 1 for class outputs that are a head's own, 0 for those of other heads and for padding."""
    class_share_H: Tensor
    """float32: 1 / number of own classes; 0 where there is only one, and so nothing to choose."""
    weight_H: Tensor
    """float32."""
    table_HF: Tensor
    """The last three beside each other, for kernels: weight, class share, own classes; float32 [H, 2 + P]."""

    @property
    def num(self) -> int:
        return self.groups.num_heads


@functools.lru_cache(maxsize=64)
def heads_on(groups: HeadConfig, device: torch.device) -> Heads:
    """The constants of a head configuration; the first call copies them to the device."""
    local = range(groups.nc) if groups.full_head else groups.local_C
    own_HP = torch.zeros(groups.num_heads, max(groups.outputs_H) - 5)
    for class_id, head in enumerate(groups.head_C):
        own_HP[head, local[class_id]] = 1
    num_H = own_HP.sum(1)
    share_H = torch.where(num_H > 1, 1 / num_H, 0.0)
    weight_H = torch.tensor(groups.weight_H)
    table_HF = torch.cat((weight_H[:, None], share_H[:, None], own_HP), 1)
    constants = (torch.tensor(groups.head_C), torch.tensor(local), own_HP, share_H, weight_H, table_HF)
    return Heads(groups, *(copy_async(each, device) for each in constants))


def num_images(maps: Sequence[Tensor], heads: Heads | None) -> int:
    """Images of maps that are given to kernels: pictures, or with several heads (picture, head)."""
    return maps[0].shape[0] * (1 if heads is None else heads.num)


def num_classes(maps: Sequence[Tensor], heads: Heads | None) -> int:
    """Most classes that a cell predicts."""
    return maps[0].shape[4] - 5 if heads is None else heads.own_HP.shape[1]


def route(targets_T6: Tensor, heads: Heads) -> Tensor:
    """Targets as the heads see them, float32 [T, 6]: (picture, head) as the image, the place among a head's outputs
    as the class. Padding stays padding."""
    class_T = targets_T6[:, 1].long().clamp(0, heads.groups.nc - 1)
    picture_T = targets_T6[:, 0]
    image_T = torch.where(picture_T >= 0, picture_T * heads.num + heads.head_C[class_T], -1)
    return torch.cat((torch.stack((image_T, heads.column_C[class_T]), 1).float(), targets_T6[:, 2:].float()), 1)


# The joined map of several heads, in the shape of a map of images: for torch operations that read some of its cells.
#
# Dimension key:  B pictures   H heads   V = B * H images   A anchors   Y, X rows and columns   N channels of the map
#                 O = 5 + most classes a head predicts   n cells


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
    return copy_async(torch.tensor([[*p, *[p[-1]] * (num_outputs - len(p))] for p in planes]), device)
