"""What the GPU kernels can take, and the table on the device that tells them about the maps."""

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.kernels import HAS_TRITON
from flatout.yolo.multihead.head_config import OBJECTNESS, channels_of_planes

logger = logging.getLogger(__name__)

MAX_KERNEL_LAYERS = 4
"""As many maps as the GPU kernels take."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernels_ready(maps: Sequence[Tensor]) -> bool:
    """True for maps on a GPU that Triton can compile for; says once what it costs where it cannot."""
    if not maps[0].is_cuda:
        return False
    reason = _reason_against(len(maps), tuple({each.dtype for each in maps}))
    return reason is None


@functools.cache
def _reason_against(num_layers: int, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if not HAS_TRITON:
        reason = "Triton is not installed"
    elif num_layers > MAX_KERNEL_LAYERS:
        reason = f"there are {num_layers} detection layers, and the kernels take {MAX_KERNEL_LAYERS}"
    elif len(dtypes) > 1 or dtypes[0] not in _DTYPES:
        reason = f"the prediction maps are {' and '.join(map(str, dtypes))}, and the kernels want one of {_DTYPES}"
    else:
        return None
    # Cached, so once per reason.
    logger.warning(
        "Detection loss without its GPU kernels: %s. The same numbers, but every step waits for the GPU "
        "several times and takes longer.",
        reason,
    )
    return reason


# Shapes and strides of the prediction maps, as a small table on the device that kernels read.
#
# As arguments of the kernels they would be compiled in, anew for every image size.

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


def layer_table(maps: Sequence[Tensor], outputs_H: tuple[int, ...] = ()) -> Tensor:
    """int64 [L, 8] on the maps' device. Made once for each combination of shapes, so only the first step copies.

    For joined maps [B, N, Y, X] of several heads with so many outputs per anchor, rows from MAX_KERNEL_LAYERS on say
    of each head at which channel its boxes and classes begin, how many of these an anchor has, and at which channel its
    objectness begins (multihead/head_config.py).
    """
    kinds = tuple(MapKind((each.shape[3], each.shape[2]), _strides(each)) for each in maps)
    return _table(kinds, outputs_H, maps[0].shape[1], maps[0].device)


def _strides(one_map: Tensor) -> tuple[int, ...]:
    """Of image, anchor, row, column and channel; in a joined map the anchor's differs from head to head."""
    if one_map.dim() == 5:
        return one_map.stride()
    image, channel, row, column = one_map.stride()
    return image, 0, row, column, channel


@functools.lru_cache(maxsize=256)
def _table(kinds: tuple[MapKind, ...], outputs_H: tuple[int, ...], channels: int, device: torch.device) -> Tensor:
    layers = [[*kind.sides, *kind.strides, 0] for kind in kinds]
    filling = [[0] * len(FIELDS)] * (MAX_KERNEL_LAYERS - len(kinds))
    num_anchors = channels // sum(outputs_H) if outputs_H else 0
    planes = channels_of_planes(outputs_H, num_anchors)[:: num_anchors or 1]
    heads = [[plane[0], len(plane) - 1, plane[OBJECTNESS], *[0] * (len(FIELDS) - 3)] for plane in planes]
    return _constant([*layers, *(filling + heads if heads else [])], device)


@functools.lru_cache(maxsize=256)
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A float32 vector that is on the device already when the next step asks for it. Do not write to it."""
    return _constant(values, device)


def _constant(values: object, device: torch.device) -> Tensor:
    return without_waiting(torch.tensor(values), device)


def without_waiting(host: Tensor, device: torch.device) -> Tensor:
    """A constant on the device, copied there without making the host wait."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
