"""Assignment on a GPU by kernels: no wait, and no shape that depends on anything but the number of targets.

    targets --group_rows--> rows by image --list_columns--> candidates in slots --read_columns--> predictions there
            --take_columns--> choices --settle_contested--> owners

Memory: slots_per_target (45 for three layers) x T slots of about 60 bytes; pairs are never stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.kernels import start
from flatout.yolo.loss import kernels_assign
from flatout.yolo.loss.kernel_support import MAX_KERNEL_LAYERS, constants, layer_table
from flatout.yolo.loss.matches import Anchors, Matches, Search, Spans
from flatout.yolo.multihead.joined_maps import Heads, num_classes, num_images

KINDS = 5
"""Kinds of candidate cell: centre, left, up, right, down."""

PROGRAMS = 2048
"""Programs of the kernels that loop over slots: some for every multiprocessor of today's GPUs."""


class _Columns(NamedTuple):
    """What the network says at the candidates, [M] each unless stated; kernels_columns.read_columns says what."""

    offset: Tensor
    box_4M: Tensor
    sure: Tensor
    nothing: Tensor


def route_on_device(targets_T6: Tensor, heads: Heads) -> Tensor:
    """`heads.route` in one kernel instead of ten."""
    routed_T6 = torch.empty_like(targets_T6, dtype=torch.float32, memory_format=torch.contiguous_format)
    if len(targets_T6):
        start(
            kernels_assign.route_rows,
            -(-len(targets_T6) // 256),
            plain_float(targets_T6),
            heads.head_C,
            heads.column_C,
            routed_T6,
            len(targets_T6),
            HEADS=heads.num,
            CLASSES=heads.groups.nc,
            BLOCK=256,
        )
    return routed_T6


def list_on_device(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, search: Search, heads: Heads | None = None
) -> Matches:
    """Every candidate in its slot, with the target that brought it; `heads` where the maps are joined."""
    num_layers, num_anchors, _ = anchors.size_LA2.shape
    num = num_images(maps, heads)
    spans = _group(plain_float(targets_T6), num, KINDS * num_anchors * num_layers, num_layers)
    num_slots = spans.slots_per_target * len(targets_T6)
    place_M, image_M = spans.image_T.new_empty(2, num_slots)
    target_M = spans.image_T.new_full((num_slots,), -1)
    if num_slots:
        start(
            kernels_assign.list_columns,
            num,
            plain_float(targets_T6),
            spans.row_T,
            spans.first_row_B,
            layer_table(maps),
            plain_float(anchors.size_LA2),
            place_M,
            image_M,
            target_M,
            spans.first_slot_BL,
            search.anchor_t,
            search.reach,
            LAYERS=num_layers,
            ANCHORS=num_anchors,
            SLOTS=spans.slots_per_target,
            KINDS=power_of_two(KINDS * num_anchors),
            # An image of several heads has the targets of one: a small program each, and all of them at once.
            ROWS=32 if heads is None else 8,
            num_warps=4 if heads is None else 1,
        )
    return Matches(place_M, image_M, target_M, spans=spans)


def ota_on_device(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, search: Search, heads: Heads | None = None
) -> Matches:
    """The OTA matches, in the slots of the candidates."""
    candidates = list_on_device(maps, targets_T6, anchors, search, heads)
    num_taken_T = targets_T6.new_zeros(len(targets_T6), dtype=torch.int32)
    if not len(targets_T6):
        return candidates._replace(num_taken_T=num_taken_T)
    spans = candidates.spans
    assert spans is not None
    columns = _read(maps, candidates, anchors, heads)
    num_slots, most_classes = len(candidates.place_M), num_classes(maps, heads)
    num_takers_M = torch.zeros_like(candidates.target_M)
    owner_M = torch.full_like(candidates.target_M, -1)
    height_px = maps[0].shape[2] * anchors.strides_px[0]
    maps_and_targets = (*four_maps(maps), layer_table(maps), plain_float(targets_T6))
    start(
        kernels_assign.take_columns,
        len(targets_T6),
        *maps_and_targets,
        spans.row_T,
        spans.image_T,
        spans.first_row_B,
        spans.first_slot_BL,
        candidates.place_M,
        *columns,
        num_taken_T,
        num_takers_M,
        owner_M,
        height_px,
        num_images(maps, heads),
        num_slots,
        LAYERS=len(maps),
        CLASSES=most_classes,
        SLOTS=spans.slots_per_target,
        TOP=search.top,
        KEEP=32,
        BLOCK=256,
        num_warps=1,
    )
    start(
        kernels_assign.settle_contested,
        PROGRAMS,
        *maps_and_targets,
        spans.row_T,
        spans.first_row_B,
        candidates.place_M,
        candidates.image_M,
        *columns,
        num_takers_M,
        owner_M,
        height_px,
        num_slots,
        CLASSES=most_classes,
        COLUMNS=16,
        ROWS=32,
    )
    return candidates._replace(target_M=owner_M, num_taken_T=num_taken_T)


def outputs_of(heads: Heads | None) -> tuple[int, ...]:
    """Outputs per anchor of each head of joined maps; none for maps of a single head."""
    return () if heads is None else heads.groups.outputs_H


def four_maps(maps: Sequence[Tensor]) -> list[Tensor]:
    """The maps as the kernels' four pointers; the last stands in for those that are missing."""
    return [*maps, *[maps[-1]] * (MAX_KERNEL_LAYERS - len(maps))]


def plain_float(numbers: Tensor) -> Tensor:
    """As kernels read it: float32, contiguous. Usually the tensor itself."""
    return numbers.float().contiguous()


def classes_at_once(num_classes: int) -> int:
    """Classes a kernel holds in registers at a time."""
    return min(128, power_of_two(num_classes))


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _group(targets_T6: Tensor, batch_size: int, slots_per_target: int, num_layers: int) -> Spans:
    """Order the targets by image; `first_slot_BL` is left to be filled."""
    image_T = targets_T6[:, 0].to(torch.int32)
    row_T = torch.empty_like(image_T)
    first_row_B = image_T.new_empty(batch_size + 1)
    start(kernels_assign.group_rows, batch_size + 1, image_T, row_T, first_row_B, len(image_T), BLOCK=1024)
    return Spans(slots_per_target, image_T, row_T, first_row_B, image_T.new_empty(batch_size, num_layers + 1))


def _read(maps: Sequence[Tensor], candidates: Matches, anchors: Anchors, heads: Heads | None) -> _Columns:
    """Read every candidate's predictions."""
    num_slots, most_classes = len(candidates.place_M), num_classes(maps, heads)
    numbers_6M = maps[0].new_empty(6, num_slots, dtype=torch.float32)
    offset_M = candidates.place_M.new_empty(num_slots, dtype=torch.int64)
    columns = _Columns(offset_M, numbers_6M[:4], numbers_6M[4], numbers_6M[5])
    start(
        kernels_assign.read_columns,
        PROGRAMS,
        *four_maps(maps),
        layer_table(maps, outputs_of(heads)),
        numbers_6M if heads is None else heads.table_HF,
        plain_float(anchors.size_LA2),
        constants(anchors.strides_px, maps[0].device),
        *candidates[:3],
        *columns,
        num_slots,
        ANCHORS=anchors.size_LA2.shape[1],
        HEADS=0 if heads is None else heads.num,
        CLASSES=most_classes,
        COLUMNS=16,
        AT_ONCE=classes_at_once(most_classes),
    )
    return columns
