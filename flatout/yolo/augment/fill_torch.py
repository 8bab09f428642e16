"""Polygons filled into masks, in plain torch, one after the other: the twin of fill_triton.py.

Dimension key:  K polygons   P points   J masks   h w a polygon's box
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.augment.paste_torch import inside_polygon


class Fills(NamedTuple):
    """Polygons to fill; see `device_copy` for the columns of a span."""

    span_K7: Tensor
    """int32."""
    host_span_K7: np.ndarray
    point_P2: Tensor
    """int32."""


class TorchFill:
    """Sets masks uint8 [J, H, W] to 1 inside of polygons and on their edges, in place.

    A dozen operations for each polygon, from a loop on the host: slow on a GPU, where the kernel is meant to do it.
    """

    def __call__(self, fills: Fills, masks: Tensor) -> None:
        for mask, first, num, x1, y1, x2, y2 in fills.host_span_K7.tolist():
            columns, rows = (
                torch.arange(begin, end + 1, dtype=torch.int32, device=masks.device)
                for begin, end in ((x1, x2), (y1, y2))
            )
            masks[mask, y1 : y2 + 1, x1 : x2 + 1] |= inside_polygon(fills.point_P2[first : first + num], columns, rows)
