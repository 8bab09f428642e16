"""Shapes and strides of the prediction maps, as a small table on the device that kernels read.

As arguments of the kernels they would be compiled in, anew for every image size.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FIELDS = (
    "columns",
    "rows",
    "image_stride",
    "anchor_stride",
    "row_stride",
    "column_stride",
    "channel_stride",
    "padding",
)
"""Columns of the table, one row per layer; strides in elements."""


class MapKind(NamedTuple):
    """What the table says of a map."""

    sides: tuple[int, int]
    strides: tuple[int, ...]


def layer_table(maps: Sequence[Tensor]) -> Tensor:
    """int64 [L, 8] on the maps' device. Made once for each combination of shapes, so only the first step copies."""
    kinds = tuple(MapKind((each.shape[3], each.shape[2]), each.stride()) for each in maps)
    return _table(kinds, maps[0].device)


@functools.lru_cache(maxsize=256)
def _table(kinds: tuple[MapKind, ...], device: torch.device) -> Tensor:
    return _constant([[*kind.sides, *kind.strides, 0] for kind in kinds], device)


@functools.lru_cache(maxsize=256)
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A float32 vector that is on the device already when the next step asks for it. Do not write to it."""
    return _constant(values, device)


def _constant(values: object, device: torch.device) -> Tensor:
    host = torch.tensor(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
