"""Checks whether the GPU kernels of the loss can be used, and the device tables with the layout of the maps."""

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.kernels import HAS_TRITON
from flatout.yolo.multihead.head_config import OBJECTNESS, channels_of_planes

logger = logging.getLogger(__name__)

MAX_KERNEL_LAYERS = 4
"""Most maps that the GPU kernels take."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def can_use_kernels(maps: Sequence[Tensor]) -> bool:
    """Whether the maps are on a GPU and the kernels support them; warns once per reason if they do not."""
    if not maps[0].is_cuda:
        return False
    return _unsupported_reason(len(maps), tuple({each.dtype for each in maps})) is None


@functools.cache
def _unsupported_reason(num_layers: int, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if not HAS_TRITON:
        reason = "Triton is not installed"
    elif num_layers > MAX_KERNEL_LAYERS:
        reason = f"there are {num_layers} detection layers, and the kernels support up to {MAX_KERNEL_LAYERS}"
    elif len(dtypes) > 1 or dtypes[0] not in _DTYPES:
        reason = f"the prediction maps are {' and '.join(map(str, dtypes))}, and the kernels need one of {_DTYPES}"
    else:
        return None
    # The function is cached, so this is logged once per reason.
    logger.warning(
        "The detection loss runs without its GPU kernels: %s. The results are the same, but every step waits for the "
        "GPU several times and takes longer.",
        reason,
    )
    return reason


# Shapes and strides of the prediction maps, as a small table on the device
#
# As arguments of the kernels they would be compiled in, again for every image size.

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


def layer_table(maps: Sequence[Tensor], outputs_H: tuple[int, ...] = ()) -> Tensor:
    """int64 [L, 8] on the maps' device. Cached for each combination of shapes, so only the first step copies it.

    For joined maps [B, N, Y, X] of several heads, `outputs_H` has the outputs per anchor of each head, and rows from
    MAX_KERNEL_LAYERS on hold, for each head, the channel at which its boxes and classes begin, how many of these an
    anchor has, and the channel at which its objectness begins (multihead/head_config.py).
    """
    layouts = tuple((each.shape[3], each.shape[2], *_strides(each), 0) for each in maps)
    return _table(layouts, outputs_H, maps[0].shape[1], maps[0].device)


def _strides(one_map: Tensor) -> tuple[int, ...]:
    """Strides of image, anchor, row, column and channel; 0 for the anchor of joined maps: it depends on the head."""
    if one_map.dim() == 5:
        return one_map.stride()
    image, channel, row, column = one_map.stride()
    return image, 0, row, column, channel


@functools.lru_cache(maxsize=256)
def _table(
    layouts: tuple[tuple[int, ...], ...], outputs_H: tuple[int, ...], channels: int, device: torch.device
) -> Tensor:
    filling = [[0] * len(FIELDS)] * (MAX_KERNEL_LAYERS - len(layouts))
    num_anchors = channels // sum(outputs_H) if outputs_H else 0
    planes = channels_of_planes(outputs_H, num_anchors)[:: num_anchors or 1]
    heads = [[plane[0], len(plane) - 1, plane[OBJECTNESS], *[0] * (len(FIELDS) - 3)] for plane in planes]
    return copy_async(torch.tensor([*layouts, *(filling + heads if heads else [])]), device)


@functools.lru_cache(maxsize=256)
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A cached float32 vector on the device. Do not write to it."""
    return copy_async(torch.tensor(values), device)


def copy_async(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, copied without making the host wait."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
