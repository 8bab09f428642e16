"""Which kernel suppresses, and how torchvision's is called.

Dimension key:  B images   M candidates, best first in each image   D survivors
"""

import importlib.util
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from flatout.engine.launch import HAS_TRITON
from flatout.errors import ConfigError
from flatout.yolo.nms.sweep import sweep_kernel

Kernel = Callable[[Tensor, Tensor, float, int], Tensor]
"""(box float32 [M, 4], candidates per image int64 [B], threshold, max_det) -> survivors, ascending int64 [D].

A box goes if its IoU with a better survivor of its image is greater than the threshold, which is a float32 number.
"""


def kernel_named(name: str, device: torch.device) -> Kernel:
    """The kernel a config asks for on this device; "auto" never asks for what is not installed."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and HAS_TRITON else "sweep"
    if name == "triton":
        if device.type != "cuda":
            raise ConfigError(f'nms.kernel="triton" runs on CUDA, but the predictions are on {device}. Use "auto".')
        from flatout.yolo.nms.greedy_triton import greedy_kernel

        return greedy_kernel
    if name == "torchvision":
        if not importlib.util.find_spec("torchvision"):
            raise ConfigError('nms.kernel="torchvision" needs torchvision, which is not installed. Use "auto".')
        return torchvision_kernel
    return sweep_kernel


def float32_at_most(threshold: float) -> float:
    """The largest float32 number not above a threshold: greater than the one is greater than the other, in float32."""
    nearest = np.float32(threshold)
    return float(nearest if float(nearest) <= threshold else np.nextafter(nearest, np.float32(-1)))


def torchvision_kernel(box_M4: Tensor, count_B: Tensor, threshold: float, max_det: int) -> Tensor:
    """Image by image through torchvision.ops.nms."""
    from torchvision.ops import nms

    kept, begin = [torch.zeros(0, dtype=torch.int64, device=box_M4.device)], 0
    for count in count_B.tolist():
        # Already best first; the falling numbers only say so.
        falling = torch.arange(count, 0, -1, dtype=torch.float32, device=box_M4.device)
        kept.append(nms(box_M4[begin : begin + count], falling, threshold)[:max_det] + begin)
        begin += count
    return torch.cat(kept)
