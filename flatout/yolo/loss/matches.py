"""The result of an assignment: which cell of which prediction map must predict which target.

Dimension key:  T targets   L layers   A anchors per layer   B images   M matches, or slots for matches
                n matches of one layer
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LAYER_BITS, ANCHOR_BITS, SIDE_BITS = 3, 3, 12
MAX_SIDE = 1 << SIDE_BITS
"""Most cells along one side of a map; at stride 8 an image side of 32,768 px."""


class Anchors(NamedTuple):
    """The anchor boxes of a detector."""

    size_LA2: Tensor
    """Width and height in cells of the layer, float32, on the device of the maps."""

    strides_px: tuple[float, ...]
    """Side of a cell in each layer."""


class Search(NamedTuple):
    """Which cells around a target are candidates, and how many of them it may take."""

    anchor_t: float = 4.0
    """A target fits an anchor if neither side differs by this factor or more."""

    reach: float = 0.5
    """In cells: neighbours closer than this to the target's centre are candidates too; 1.0 for auxiliary heads."""

    top: int = 10
    """OTA: a target takes as many cells as the sum of its `top` largest overlaps."""


class Spans(NamedTuple):
    """The slots of each image and layer, for matches kept in a fixed number of slots (on_device.py)."""

    slots_per_target: int
    image_T: Tensor
    """int32, image of each target; padding has an image that is not in the batch."""

    row_T: Tensor
    """int32, targets sorted by image; undefined after the last target that is not padding."""

    first_row_B: Tensor
    """int32 [B + 1]: an image's slots begin at slots_per_target * first_row_B[image]; the last entry is the number of
    rows."""

    first_slot_BL: Tensor
    """int32 [B, L + 1]: first slot of each layer, relative to the image's first slot; the last entry is the number of
    slots in use."""


class Matches(NamedTuple):
    """Cells and the targets they must predict.

    The order within an image and layer matters: of several matches of one cell the last decides its objectness.
    """

    packed_M: Tensor
    """int32, the packed cell (`unpack_cells`). Undefined in empty slots."""

    image_M: Tensor
    """int32, index in the batch. Undefined in empty slots."""

    target_M: Tensor
    """int32, row in `targets`; -1 in empty slots."""

    num_taken_T: Tensor | None = None
    """OTA: int32, how many cells each target takes before conflicts are resolved; 0 without candidates."""

    spans: Spans | None = None


class Cell(NamedTuple):
    """Cells in the prediction maps of an image; int64 [M] each."""

    layer: Tensor
    anchor: Tensor
    row: Tensor
    column: Tensor


def pack_cells(layer: Tensor, anchor: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """One non-negative int32 per cell, unique within an image."""
    side = (row << SIDE_BITS) | column
    return ((((side << ANCHOR_BITS) | anchor) << LAYER_BITS) | layer).to(torch.int32)


def unpack_cells(packed_M: Tensor) -> Cell:
    """The inverse of `pack_cells`."""
    packed = packed_M.long()
    side = packed >> (LAYER_BITS + ANCHOR_BITS)
    return Cell(
        layer=packed & ((1 << LAYER_BITS) - 1),
        anchor=(packed >> LAYER_BITS) & ((1 << ANCHOR_BITS) - 1),
        row=side >> SIDE_BITS,
        column=side & (MAX_SIDE - 1),
    )


def check_maps(maps: Sequence[Tensor], anchors: Anchors, *, joined: bool = False) -> None:
    """Raise ValueError if the maps do not fit the anchors; `joined` maps contain several heads (joined_maps.py)."""
    num_layers, num_anchors, _ = anchors.size_LA2.shape
    shapes = [tuple(each.shape) for each in maps]
    fits = len(maps) == len(anchors.strides_px) == num_layers <= 1 << LAYER_BITS
    is_map = all(len(shape) == 4 if joined else len(shape) == 5 and shape[1] == num_anchors for shape in shapes)
    if not fits or not is_map:
        raise ValueError(
            f"prediction maps {shapes} do not fit {num_layers} layers of {num_anchors} anchors at strides "
            f"{anchors.strides_px}. Pass one map [images, anchors, rows, columns, 5 + classes] per layer."
        )
    if max(max(shape[2:4]) for shape in shapes) > MAX_SIDE or num_anchors > 1 << ANCHOR_BITS:
        raise ValueError(f"prediction maps {shapes} are too large: at most {MAX_SIDE} cells per side and 8 anchors.")
