"""GPU kernels of the assignment: list the candidates of every image, read the predictions there, and choose by cost.

An image's candidates are in slots from `slots_per_target * first_row[image]` on, in list order and without gaps. There
are enough slots for all candidates that its targets could have, so that no count has to reach the host.

Rows are targets and columns are candidates, as in ota.py. A `place` is a packed cell (matches.pack_cells), a `kind` the
offset of a candidate from the target's centre cell (ota._OFFSETS). With several heads an `image` is a head image and a
`picture` an image of the batch (multihead/joined_maps.py). Function arguments that end in _p are pointers.
"""

import triton
import triton.language as tl

from flatout.yolo.loss.kernels_math import (
    cell_offsets,
    channel_stride,
    first_class,
    is_own_class,
    layer_sides,
    of_layer,
    overlap,
    pack,
    unpack,
)
from flatout.yolo.loss.ota import OVERLAP_FLOOR, OVERLAP_WEIGHT


@triton.jit(do_not_specialize=["num_targets"])
def route_rows(
    targets_p, head_p, column_p, routed_p, num_targets, HEADS: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr
):
    """Assign targets to head images, as joined_maps.route does."""
    target = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = target < num_targets
    picture = tl.load(targets_p + target * 6, mask=there, other=-1.0)
    class_id = tl.load(targets_p + target * 6 + 1, mask=there, other=0.0).to(tl.int32)
    class_id = tl.minimum(tl.maximum(class_id, 0), CLASSES - 1)
    image = picture * HEADS + tl.load(head_p + class_id)
    tl.store(routed_p + target * 6, tl.where(picture >= 0, image, -1.0), mask=there)
    tl.store(routed_p + target * 6 + 1, tl.load(column_p + class_id).to(tl.float32), mask=there)
    for field in tl.static_range(2, 6):
        tl.store(routed_p + target * 6 + field, tl.load(targets_p + target * 6 + field, mask=there), mask=there)


@triton.jit(do_not_specialize=["num_targets"])
def group_rows(image_p, row_p, first_row_p, num_targets, BLOCK: tl.constexpr):
    """Sort the targets by image, stably: program b writes where the rows of image b begin, and which targets they are.

    Each program reads the image of every target: B x T small reads in all, and no sort. One additional program writes
    the number of rows.
    """
    image = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_targets, BLOCK):
        target = begin + lane
        other = tl.load(image_p + target, mask=target < num_targets, other=-1)
        before += ((other >= 0) & (other < image)).to(tl.int32)
    position = tl.sum(before)
    tl.store(first_row_p + image, position)
    for begin in range(0, num_targets, BLOCK):
        target = begin + lane
        other = tl.load(image_p + target, mask=target < num_targets, other=-1)
        mine = ((other == image) & (image < tl.num_programs(0) - 1)).to(tl.int32)
        num_mine = tl.sum(mine)
        if num_mine > 0:
            tl.store(row_p + position + tl.cumsum(mine, 0) - mine, target, mask=mine != 0)
            position += num_mine


@triton.jit
def _candidates(
    targets_p,
    row_p,
    table_p,
    anchor_p,
    layer,
    begin,
    end,
    anchor_t,
    reach,
    ANCHORS: tl.constexpr,
    KINDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Candidates of ROWS targets from `begin` on in one layer, as a block [kind and anchor, target]."""
    kind = (tl.arange(0, KINDS) // ANCHORS)[:, None]
    anchor = (tl.arange(0, KINDS) % ANCHORS)[:, None]
    row = begin + tl.arange(0, ROWS)[None, :]
    target = tl.load(row_p + row, mask=row < end, other=0)
    columns, rows = layer_sides(table_p, layer)
    x = tl.load(targets_p + target * 6 + 2) * columns
    y = tl.load(targets_p + target * 6 + 3) * rows
    # Exact division: a ratio equal to the limit must not fit.
    size_p = anchor_p + (layer * ANCHORS + anchor) * 2
    wide = tl.div_rn(tl.load(targets_p + target * 6 + 4) * columns, tl.load(size_p))
    high = tl.div_rn(tl.load(targets_p + target * 6 + 5) * rows, tl.load(size_p + 1))
    ratio = tl.maximum(tl.maximum(wide, tl.div_rn(1.0, wide)), tl.maximum(high, tl.div_rn(1.0, high)))
    # The axis along which a kind is offset, and the distance to the border in that direction.
    along_x = (kind == 1) | (kind == 3)
    way = tl.where(kind == 1, x, tl.where(kind == 2, y, tl.where(kind == 3, columns - x, rows - y)))
    near = (kind == 0) | ((way - tl.floor(way) < reach) & (way > 1))
    shift = tl.where(kind == 0, 0.0, tl.where(kind < 3, -reach, reach))
    column = (x + tl.where(along_x, shift, 0.0)).to(tl.int32)
    line = (y + tl.where(along_x, 0.0, shift)).to(tl.int32)
    column = tl.minimum(tl.maximum(column, 0), columns - 1)
    line = tl.minimum(tl.maximum(line, 0), rows - 1)
    found = (ratio < anchor_t) & near & (row < end) & (kind < 5)
    place = pack(layer, anchor, line, column)
    return found.to(tl.int32), place, target


@triton.jit
def list_columns(
    targets_p, row_p, first_row_p, table_p, anchor_p,
    place_p, image_p, target_p, first_slot_p,
    anchor_t, reach,
    LAYERS: tl.constexpr, ANCHORS: tl.constexpr, SLOTS: tl.constexpr, KINDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program b lists the candidates of image b: layer by layer, in each by kind, anchor and target."""
    image = tl.program_id(0)
    first_row = tl.load(first_row_p + image)
    end_row = tl.load(first_row_p + image + 1)
    slot = first_row * SLOTS
    listed = 0
    for layer in tl.static_range(LAYERS):
        tl.store(first_slot_p + image * (LAYERS + 1) + layer, listed)
        number = tl.zeros([KINDS], tl.int32)
        for begin in range(first_row, end_row, ROWS):
            found, _, _ = _candidates(
                targets_p, row_p, table_p, anchor_p, layer, begin, end_row, anchor_t, reach, ANCHORS, KINDS, ROWS
            )
            number += tl.sum(found, 1)
        position = listed + tl.cumsum(number, 0) - number
        for begin in range(first_row, end_row, ROWS):
            found, place, target = _candidates(
                targets_p, row_p, table_p, anchor_p, layer, begin, end_row, anchor_t, reach, ANCHORS, KINDS, ROWS
            )
            to = slot + position[:, None] + tl.cumsum(found, 1) - found
            tl.store(place_p + to, place, mask=found != 0)
            tl.store(image_p + to, tl.zeros_like(place) + image, mask=found != 0)
            tl.store(target_p + to, tl.zeros_like(place) + target, mask=found != 0)
            position += tl.sum(found, 1)
        listed += tl.sum(number)
    tl.store(first_slot_p + image * (LAYERS + 1) + LAYERS, listed)


@triton.jit(do_not_specialize=["num_slots"])
def read_columns(
    p0, p1, p2, p3, table_p, heads_p, anchor_p, stride_p,
    place_p, image_p, target_p,
    offset_p, box_p, sure_p, nothing_p,
    num_slots,
    ANCHORS: tl.constexpr, HEADS: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write the predictions at each candidate.

    offset: offset of its class logits in the map; box: corners in pixels, four rows of num_slots; sure: probability of
    an object; nothing: cross-entropy over the classes if none of them is true.
    """
    lane = tl.arange(0, COLUMNS)
    for block in range(tl.program_id(0), tl.cdiv(num_slots, COLUMNS), tl.num_programs(0)):
        slot = block * COLUMNS + lane
        valid = tl.load(target_p + slot, mask=slot < num_slots, other=-1) >= 0
        if tl.max(valid.to(tl.int32), 0) > 0:
            layer, anchor, row, column = unpack(tl.load(place_p + slot, mask=valid, other=0))
            image = tl.load(image_p + slot, mask=valid, other=0)
            offset, to_objectness = cell_offsets(table_p, layer, image, anchor, row, column, ANCHORS, HEADS)
            step = channel_stride(table_p, layer)
            map_p = of_layer(layer, p0, p1, p2, p3) + offset
            stride = tl.load(stride_p + layer)
            size_p = anchor_p + (layer * ANCHORS + anchor) * 2
            x = (2 * tl.sigmoid(tl.load(map_p, mask=valid, other=0).to(tl.float32)) - 0.5 + column) * stride
            y = (2 * tl.sigmoid(tl.load(map_p + step, mask=valid, other=0).to(tl.float32)) - 0.5 + row) * stride
            wide = 2 * tl.sigmoid(tl.load(map_p + 2 * step, mask=valid, other=0).to(tl.float32))
            high = 2 * tl.sigmoid(tl.load(map_p + 3 * step, mask=valid, other=0).to(tl.float32))
            half_w = wide * wide * tl.load(size_p) * (stride / 2)
            half_h = high * high * tl.load(size_p + 1) * (stride / 2)
            sure = tl.sigmoid(tl.load(map_p + to_objectness, mask=valid, other=0).to(tl.float32))
            nothing = tl.zeros([COLUMNS], tl.float32)
            for begin in range(0, CLASSES, AT_ONCE):
                one_class = begin + tl.arange(0, AT_ONCE)[None, :]
                there = valid[:, None] & (one_class < CLASSES)
                there = is_own_class(heads_p, image, one_class, there, HEADS, CLASSES)
                logit_p = map_p[:, None] + (first_class(HEADS) + one_class) * step[:, None]
                logit = tl.load(logit_p, mask=there, other=0).to(tl.float32)
                right = tl.sqrt(tl.sigmoid(logit) * sure[:, None])
                nothing -= tl.sum(tl.where(there, tl.log(1 - right), 0.0), 1)
            tl.store(offset_p + slot, offset + first_class(HEADS) * step, mask=valid)
            tl.store(box_p + slot, x - half_w, mask=valid)
            tl.store(box_p + num_slots + slot, y - half_h, mask=valid)
            tl.store(box_p + 2 * num_slots + slot, x + half_w, mask=valid)
            tl.store(box_p + 3 * num_slots + slot, y + half_h, mask=valid)
            tl.store(sure_p + slot, sure, mask=valid)
            tl.store(nothing_p + slot, nothing, mask=valid)


# OTA assignment: one program per target loops over the candidates of its image
#
# Pairs are never stored: the loop keeps the target's `top` largest overlaps and cheapest columns, and a contested
# column is settled by another loop over the targets of its image.

_OVERLAP_WEIGHT: tl.constexpr = tl.constexpr(OVERLAP_WEIGHT)
_OVERLAP_FLOOR: tl.constexpr = tl.constexpr(OVERLAP_FLOOR)
_LAST: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NONE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_FLIP: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_LOW: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _true_box(targets_p, target, height_px, valid):
    """Corners of targets in pixels; x is scaled by the height too, as in YOLOv7."""
    x = tl.load(targets_p + target * 6 + 2, mask=valid, other=0.0) * height_px
    y = tl.load(targets_p + target * 6 + 3, mask=valid, other=0.0) * height_px
    half_w = tl.load(targets_p + target * 6 + 4, mask=valid, other=0.0) * height_px / 2
    half_h = tl.load(targets_p + target * 6 + 5, mask=valid, other=0.0) * height_px / 2
    return x - half_w, y - half_h, x + half_w, y + half_h


@triton.jit
def _cost(iou, nothing, sure, class_logit):
    """Cost of a pair, at least 0; infinite if it is not finite."""
    right = tl.sqrt(tl.sigmoid(class_logit) * sure)
    cost = nothing + tl.log((1 - right) / right) - _OVERLAP_WEIGHT * tl.log(iou + _OVERLAP_FLOOR)
    return tl.where(cost < float("inf"), tl.maximum(cost, 0.0), float("inf"))


@triton.jit
def _class_logit(p0, p1, p2, p3, table_p, place_p, offset_p, slot, class_id, valid):
    """Logit of the target's class at a candidate, float32."""
    layer, _, _, _ = unpack(tl.load(place_p + slot, mask=valid, other=0))
    offset = tl.load(offset_p + slot, mask=valid, other=0) + class_id * channel_stride(table_p, layer)
    return tl.load(of_layer(layer, p0, p1, p2, p3) + offset, mask=valid, other=0).to(tl.float32)


@triton.jit
def _keep_smallest(number, column, kept, kept_column, TOP: tl.constexpr, KEEP: tl.constexpr):
    """The TOP smallest numbers of a block and of those kept so far, by number and then by column."""
    lane = tl.arange(0, KEEP)
    best = tl.full([KEEP], _NONE, tl.int32)
    best_column = tl.full([KEEP], _NONE, tl.int32)
    for place in range(TOP):
        least = tl.minimum(tl.min(number, 0), tl.min(kept, 0))
        at_new = tl.min(tl.where(number == least, column, _NONE), 0)
        at = tl.minimum(at_new, tl.min(tl.where(kept == least, kept_column, _NONE), 0))
        number = tl.where(column == at, _NONE, number)
        kept = tl.where(kept_column == at, _NONE, kept)
        best = tl.where(lane == place, least, best)
        best_column = tl.where(lane == place, at, best_column)
    return best, best_column


@triton.jit(do_not_specialize=["num_images", "num_slots"])
def take_columns(
    p0, p1, p2, p3, table_p, targets_p,
    row_p, image_p, first_row_p, first_slot_p,
    place_p, offset_p, box_p, sure_p, nothing_p,
    num_taken_p, num_takers_p, owner_p,
    height_px, num_images, num_slots,
    LAYERS: tl.constexpr, CLASSES: tl.constexpr, SLOTS: tl.constexpr,
    TOP: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: the target of row r takes its k cheapest columns; k is the sum of its TOP largest overlaps.

    Counts the takers of each column. The owner of a column is its taker; if there are several, any one of them until
    `settle_contested`.
    """
    row = tl.program_id(0)
    if row < tl.load(first_row_p + num_images):
        target = tl.load(row_p + row)
        image = tl.load(image_p + target)
        first = tl.load(first_row_p + image) * SLOTS
        num_columns = tl.load(first_slot_p + image * (LAYERS + 1) + LAYERS)
        x1, y1, x2, y2 = _true_box(targets_p, target, height_px, True)
        class_id = tl.minimum(tl.load(targets_p + target * 6 + 1).to(tl.int32), CLASSES - 1)
        lane = tl.arange(0, BLOCK)
        largest = tl.full([KEEP], _NONE, tl.int32)
        cheapest = tl.full([KEEP], _NONE, tl.int32)
        largest_column = tl.full([KEEP], _NONE, tl.int32)
        cheapest_column = tl.full([KEEP], _NONE, tl.int32)
        for begin in range(0, num_columns, BLOCK):
            column = begin + lane
            slot = first + column
            valid = column < num_columns
            px1 = tl.load(box_p + slot, mask=valid, other=0.0)
            py1 = tl.load(box_p + num_slots + slot, mask=valid, other=0.0)
            px2 = tl.load(box_p + 2 * num_slots + slot, mask=valid, other=0.0)
            py2 = tl.load(box_p + 3 * num_slots + slot, mask=valid, other=0.0)
            iou = overlap(x1, y1, x2, y2, px1, py1, px2, py2)
            logit = _class_logit(p0, p1, p2, p3, table_p, place_p, offset_p, slot, class_id, valid)
            nothing = tl.load(nothing_p + slot, mask=valid, other=0.0)
            cost = _cost(iou, nothing, tl.load(sure_p + slot, mask=valid, other=0.0), logit)
            # The bits of non-negative floats sort like the floats; the minimum of integers is one instruction.
            small_if_large = tl.where(valid, iou.to(tl.int32, bitcast=True) ^ _FLIP, _NONE)
            cost_bits = tl.where(valid, cost.to(tl.int32, bitcast=True), _NONE)
            largest, largest_column = _keep_smallest(small_if_large, column, largest, largest_column, TOP, KEEP)
            cheapest, cheapest_column = _keep_smallest(cost_bits, column, cheapest, cheapest_column, TOP, KEEP)
        overlaps = (largest ^ _FLIP).to(tl.float32, bitcast=True)
        k = tl.maximum(tl.sum(tl.where(largest != _NONE, overlaps, 0.0), 0).to(tl.int32), 1)
        tl.store(num_taken_p + target, tl.where(num_columns > 0, k, 0))
        taken = (tl.arange(0, KEEP) < k) & (cheapest != _NONE)
        slot = first + cheapest_column
        tl.atomic_add(num_takers_p + slot, 1, mask=taken)
        tl.store(owner_p + slot, tl.zeros([KEEP], tl.int32) + target, mask=taken)


@triton.jit(do_not_specialize=["num_slots"])
def settle_contested(
    p0, p1, p2, p3, table_p, targets_p,
    row_p, first_row_p,
    place_p, image_p, offset_p, box_p, sure_p, nothing_p,
    num_takers_p, owner_p,
    height_px, num_slots,
    CLASSES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Give each column with several takers to the target of its image for which it is cheapest, taker or not."""
    for block in range(tl.program_id(0), tl.cdiv(num_slots, COLUMNS), tl.num_programs(0)):
        slot = block * COLUMNS + tl.arange(0, COLUMNS)
        contested = tl.load(num_takers_p + slot, mask=slot < num_slots, other=0) > 1
        if tl.max(contested.to(tl.int32), 0) > 0:
            image = tl.load(image_p + slot, mask=contested, other=0)
            first_row = tl.load(first_row_p + image)
            num_rows = tl.where(contested, tl.load(first_row_p + image + 1) - first_row, 0)
            px1 = tl.load(box_p + slot, mask=contested, other=0.0)[None, :]
            py1 = tl.load(box_p + num_slots + slot, mask=contested, other=0.0)[None, :]
            px2 = tl.load(box_p + 2 * num_slots + slot, mask=contested, other=0.0)[None, :]
            py2 = tl.load(box_p + 3 * num_slots + slot, mask=contested, other=0.0)[None, :]
            nothing = tl.load(nothing_p + slot, mask=contested, other=0.0)[None, :]
            sure = tl.load(sure_p + slot, mask=contested, other=0.0)[None, :]
            cheapest = tl.full([COLUMNS], _LAST, tl.int64)
            for begin in range(0, tl.max(num_rows, 0), ROWS):
                step = begin + tl.arange(0, ROWS)[:, None]
                valid = step < num_rows[None, :]
                target = tl.load(row_p + first_row[None, :] + step, mask=valid, other=0)
                x1, y1, x2, y2 = _true_box(targets_p, target, height_px, valid)
                class_id = tl.load(targets_p + target * 6 + 1, mask=valid, other=0.0).to(tl.int32)
                class_id = tl.minimum(class_id, CLASSES - 1)
                iou = overlap(x1, y1, x2, y2, px1, py1, px2, py2)
                there = slot[None, :] + tl.zeros_like(target)
                logit = _class_logit(p0, p1, p2, p3, table_p, place_p, offset_p, there, class_id, valid)
                cost = _cost(iou, nothing, sure, logit)
                key = (cost.to(tl.int32, bitcast=True).to(tl.int64) << 32) | target
                cheapest = tl.minimum(cheapest, tl.min(tl.where(valid, key, _LAST), 0))
            tl.store(owner_p + slot, (cheapest & _LOW).to(tl.int32), mask=contested)
