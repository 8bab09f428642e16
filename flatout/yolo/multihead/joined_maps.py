"""Joined maps of several heads, processed as if every head were an image of its own.

A head image is a pair of an image and a head. Assignment and loss take head images in place of images, and every target
belongs to the head image of its own head, so that one assignment and one loss handle all heads. Cells are read directly
from the joined maps [B, N, Y, X] of MultiHeadDetect: by the GPU kernels, or by torch operations through `JoinedMap`.

Dimension key:  B images   H heads   V = B * H head images; image b and head h have the number b * H + h   T targets
                C classes of the data set   P most classes a head predicts   A anchors   Y, X rows and columns
                N channels of a joined map   O = 5 + P outputs of a cell   n cells   F = 2 + P columns of a table
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
    """Constants of several heads for assignment and loss, on the device of the maps."""

    groups: HeadConfig
    head_C: Tensor
    """int64: the head of every class."""
    column_C: Tensor
    """int64: the position of every class in the class outputs of its head."""
    own_HP: Tensor
    """float32: 1 for class outputs of a head's own classes, 0 for those of other heads and for padding."""
    class_share_H: Tensor
    """float32: 1 / number of own classes; 0 for a single class, which has no class loss."""
    weight_H: Tensor
    """float32: weight of each head's losses."""
    table_HF: Tensor
    """float32: weight, class share and own classes, concatenated for the kernels."""

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
    """Number of images in maps, or of head images in joined maps."""
    return maps[0].shape[0] * (1 if heads is None else heads.num)


def num_classes(maps: Sequence[Tensor], heads: Heads | None) -> int:
    """The largest number of classes that a cell predicts."""
    return maps[0].shape[4] - 5 if heads is None else heads.own_HP.shape[1]


def route(targets_T6: Tensor, heads: Heads) -> Tensor:
    """Targets of head images, float32 [T, 6]: with the head image in place of the image, and the position in the head's
    class outputs in place of the class. Padding stays padding."""
    class_T = targets_T6[:, 1].long().clamp(0, heads.groups.nc - 1)
    image_T = targets_T6[:, 0]
    head_image_T = torch.where(image_T >= 0, image_T * heads.num + heads.head_C[class_T], -1)
    return torch.cat((torch.stack((head_image_T, heads.column_C[class_T]), 1).float(), targets_T6[:, 2:].float()), 1)


@dataclass(frozen=True)
class JoinedMap:
    """A view of a joined map with the shape of a map of head images, for torch operations that read some of its cells.

    Nothing is copied until cells are read.
    """

    values_BNYX: Tensor
    heads: Heads
    num_anchors: int

    @property
    def shape(self) -> torch.Size:
        """[V, A, Y, X, O], as if every head image had its own map."""
        batch, _, rows, columns = self.values_BNYX.shape
        outputs = 5 + self.heads.own_HP.shape[1]
        return torch.Size((batch * self.heads.num, self.num_anchors, rows, columns, outputs))

    @property
    def device(self) -> torch.device:
        return self.values_BNYX.device

    def index_of(self, index_n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices of all outputs of cells in the values, [n, O] when broadcast; `index_n` are flat indices in `shape`.

        For a head with fewer classes than others the remaining outputs repeat its last class; they do not count.
        """
        _, num_anchors, rows, columns, num_outputs = self.shape
        head_image_n = index_n // (num_anchors * rows * columns)
        plane_n = head_image_n % self.heads.num * num_anchors + index_n // (rows * columns) % num_anchors
        channel_nO = _channels(self.heads.groups.outputs_H, self.num_anchors, num_outputs, self.device)[plane_n]
        row_n, column_n = index_n // columns % rows, index_n % columns
        return (head_image_n // self.heads.num)[:, None], channel_nO, row_n[:, None], column_n[:, None]

    def rows(self, index_n: Tensor) -> Tensor:
        """All outputs of cells, [n, O]."""
        return self.values_BNYX[self.index_of(index_n)]

    def objectness(self, values_BNYX: Tensor) -> Tensor:
        """Objectness of all head images, [B, H * A, Y, X]: a view."""
        return values_BNYX[:, -self.heads.num * self.num_anchors :]


@functools.lru_cache(maxsize=64)
def _channels(outputs_H: tuple[int, ...], num_anchors: int, num_outputs: int, device: torch.device) -> Tensor:
    """Channels of every head and anchor, int64 [H * A, O]; the first call copies them to the device."""
    planes = channels_of_planes(outputs_H, num_anchors)
    return copy_async(torch.tensor([[*p, *[p[-1]] * (num_outputs - len(p))] for p in planes]), device)
