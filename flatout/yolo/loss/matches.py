"""What an assignment says: which cell of which prediction map has to predict which target.

Dimension key:  T targets   L layers   A anchors per layer   M matches, or slots for matches
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LAYER_BITS, ANCHOR_BITS, SIDE_BITS = 3, 3, 12
MAX_SIDE = 1 << SIDE_BITS
"""Cells along one side of a map; at stride 8 an image side of 32,768 px."""


class Anchors(NamedTuple):
    """The anchor boxes of a detector."""

    size_LA2: Tensor
    """Width and height in cells of the layer, float32, on the device of the maps."""

    strides_px: tuple[float, ...]
    """Side of a cell in each layer."""


class Search(NamedTuple):
    """Which cells around a target are candidates, and how many of them it may take."""

    anchor_t: float = 4.0
    """A target and an anchor go together if no side differs by this factor or more."""

    reach: float = 0.5
    """Cells: neighbours this near to the target's centre are candidates too. 0.5 ordinary, 1.0 the wide search."""

    top: int = 10
    """OTA: a target takes as many cells as its `top` largest overlaps add up to."""


class Spans(NamedTuple):
    """Where the slots of an image lie when matches are kept in slots of fixed number (assign/on_device.py)."""

    slots_per_target: int
    image_T: Tensor
    """int32, image of each target; padding has one that is not in the batch."""

    row_T: Tensor
    """int32, targets in the order of their images; those of padding are undefined."""

    first_row_B: Tensor
    """int32 [B + 1]: an image's slots begin at slots_per_target * first_row_B[image]; the last counts all rows."""

    first_slot_BL: Tensor
    """int32 [B, L + 1]: where each layer's slots begin, from the image's first on; the last entry is their number."""


class Matches(NamedTuple):
    """Cells and the targets they have to predict. In list order within an image and layer: of several matches
    of one cell the last decides its objectness."""

    place_M: Tensor
    """int32, the cell, packed; see `unpack_place`. Undefined in empty slots."""

    image_M: Tensor
    """int32, index in the batch. Undefined in empty slots."""

    target_M: Tensor
    """int32, row in `targets`; -1: this slot is empty."""

    num_taken_T: Tensor | None = None
    """OTA: int32, how many cells each target asked for, before conflicts; 0 without candidates."""

    spans: Spans | None = None


class Place(NamedTuple):
    """A cell within the prediction maps of an image; int64 [M] each."""

    layer: Tensor
    anchor: Tensor
    row: Tensor
    column: Tensor


def pack_place(layer: Tensor, anchor: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """One non-negative int32 per cell; equal numbers mean the same cell of an image."""
    side = (row << SIDE_BITS) | column
    return ((((side << ANCHOR_BITS) | anchor) << LAYER_BITS) | layer).to(torch.int32)


def unpack_place(place_M: Tensor) -> Place:
    """The cells behind packed numbers."""
    place = place_M.long()
    side = place >> (LAYER_BITS + ANCHOR_BITS)
    return Place(
        layer=place & ((1 << LAYER_BITS) - 1),
        anchor=(place >> LAYER_BITS) & ((1 << ANCHOR_BITS) - 1),
        row=side >> SIDE_BITS,
        column=side & (MAX_SIDE - 1),
    )


def check_maps(maps: Sequence[Tensor], anchors: Anchors, *, joined: bool = False) -> None:
    """Refuse maps that do not belong to these anchors; `joined` ones hold several heads (heads.py)."""
    num_layers, num_anchors, _ = anchors.size_LA2.shape
    shapes = [tuple(each.shape) for each in maps]
    fits = len(maps) == len(anchors.strides_px) == num_layers <= 1 << LAYER_BITS
    is_map = all(len(shape) == 4 if joined else len(shape) == 5 and shape[1] == num_anchors for shape in shapes)
    if not fits or not is_map:
        raise ValueError(
            f"prediction maps {shapes} do not fit {num_layers} layers of {num_anchors} anchors at strides "
            f"{anchors.strides_px}: one map [images, anchors, rows, columns, 5 + classes] per layer is wanted."
        )
    if max(max(shape[2:4]) for shape in shapes) > MAX_SIDE or num_anchors > 1 << ANCHOR_BITS:
        raise ValueError(f"prediction maps {shapes} are larger than {MAX_SIDE} cells a side or 8 anchors.")


def list_matches(matches: Matches, layer: int) -> Tensor:
    """The matches of one layer in list order: int64 [n, 5] of image, anchor, row, column, target.

    For looking at an assignment: waits for the device, and the losses do not use it. Candidates listed on a GPU come by
    image first; within an image the order is the same.
    """
    place = unpack_place(matches.place_M)
    (found_n,) = torch.nonzero((matches.target_M >= 0) & (place.layer == layer), as_tuple=True)
    columns = (matches.image_M, place.anchor, place.row, place.column, matches.target_M)
    return torch.stack([each[found_n].long() for each in columns], 1)
