"""Whether the GPU kernels can take these maps."""

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.engine.launch import HAS_TRITON
from flatout.yolo.assign.matches import MAX_KERNEL_LAYERS

logger = logging.getLogger(__name__)

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
