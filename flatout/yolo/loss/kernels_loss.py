# mypy: disable-error-code="no-untyped-def"
"""GPU kernels of the loss, forward and backward: terms of the matched cells, objectness of all cells, and their sum.

Every program writes partial sums, and one program adds them up in a fixed order, so that the same input gives the same
bits. A `place` is a packed cell (matches.pack_cells), or in `place_of` a position in memory. With several heads an
`image` is a head image (multihead/joined_maps.py). Function arguments that end in _p are pointers.
"""

import triton
import triton.language as tl

from flatout.yolo.loss.kernels_math import (
    bce,
    bce_gradient,
    cell_offsets,
    channel_stride,
    ciou,
    decode,
    decode_gradient,
    first_class,
    is_own_class,
    layer_sides,
    of_layer,
    unpack,
)

SUMS = 4
"""Sums per layer: box loss, class loss, objectness loss beyond that of an empty cell, number of matches."""
_SUMS: tl.constexpr = tl.constexpr(SUMS)


@triton.jit
def cell_pointers(p0, p1, p2, p3, table_p, place, image, ANCHORS: tl.constexpr, HEADS: tl.constexpr):
    """Pointers to a cell's box and objectness."""
    layer, anchor, row, column = unpack(place)
    box, to_objectness = cell_offsets(table_p, layer, image, anchor, row, column, ANCHORS, HEADS)
    box_p = of_layer(layer, p0, p1, p2, p3) + box
    return box_p, box_p + to_objectness


@triton.jit
def head_weight(heads_p, image, HEADS: tl.constexpr, CLASSES: tl.constexpr):
    """Weight of the losses of an image's head."""
    weight = 1.0
    if HEADS > 0:
        weight = tl.load(heads_p + image % HEADS * (2 + CLASSES))
    return weight


@triton.jit
def class_share(heads_p, image, HEADS: tl.constexpr, CLASSES: tl.constexpr):
    """One over the number of classes of an image's head; 0 if it has only one class."""
    share = 1.0 / CLASSES
    if HEADS > 0:
        share = tl.load(heads_p + image % HEADS * (2 + CLASSES) + 1)
    return share


@triton.jit
def group_of(image, layer, LAYERS: tl.constexpr, HEADS: tl.constexpr):
    """Group in which a match is counted: its layer, or with several heads its head and layer.

    With several heads, `image` numbers pairs of an image and a head: `image % HEADS` is the head.
    """
    group = layer
    if HEADS > 0:
        group = image % HEADS * LAYERS + layer
    return group


@triton.jit
def anchor_size(anchor_p, place, ANCHORS: tl.constexpr):
    """Width and height of a cell's anchor, in cells."""
    layer, anchor, _, _ = unpack(place)
    size_p = anchor_p + (layer * ANCHORS + anchor) * 2
    return tl.load(size_p), tl.load(size_p + 1)


@triton.jit
def true_box(targets_p, table_p, target, place, valid):
    """A target's box in cells, relative to the corner of a cell: centre and size."""
    layer, _, row, column = unpack(place)
    columns, rows = layer_sides(table_p, layer)
    true_p = targets_p + target * 6
    x = tl.load(true_p + 2, mask=valid, other=0.0) * columns - column
    y = tl.load(true_p + 3, mask=valid, other=0.0) * rows - row
    w = tl.load(true_p + 4, mask=valid, other=0.0) * columns
    return x, y, w, tl.load(true_p + 5, mask=valid, other=0.0) * rows


@triton.jit
def read_logits(box_p, objectness_p, step, valid):
    """Box and objectness of a cell, float32."""
    x = tl.load(box_p, mask=valid, other=0.0).to(tl.float32)
    y = tl.load(box_p + step, mask=valid, other=0.0).to(tl.float32)
    w = tl.load(box_p + 2 * step, mask=valid, other=0.0).to(tl.float32)
    h = tl.load(box_p + 3 * step, mask=valid, other=0.0).to(tl.float32)
    return x, y, w, h, tl.load(objectness_p, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _same_cell(
    slot, place, image, valid,
    place_p, target_p, first_row_p, first_slot_p,
    LAYERS: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Whether a match is the last of its cell, and the slot of the cell's previous match or -1.

    Found in a loop over the matches of the same image and layer, without a table of all cells.
    """
    layer, _, _, _ = unpack(place)
    first = tl.load(first_row_p + image) * SLOTS
    span_p = first_slot_p + image * (LAYERS + 1) + layer
    begin = first + tl.load(span_p)
    end = tl.where(valid, first + tl.load(span_p + 1), begin)
    later = tl.zeros([COLUMNS], tl.int32)
    before = tl.full([COLUMNS], -1, tl.int32)
    for step in range(0, tl.max(end - begin, 0), OTHERS):
        other = begin[:, None] + step + tl.arange(0, OTHERS)[None, :]
        there = other < end[:, None]
        same = there & (tl.load(place_p + other, mask=there, other=-1) == place[:, None])
        same = same & (tl.load(target_p + other, mask=there, other=-1) >= 0)
        later = tl.maximum(later, tl.max((same & (other > slot[:, None])).to(tl.int32), 1))
        before = tl.maximum(before, tl.max(tl.where(same & (other < slot[:, None]), other, -1), 1))
    return valid & (later == 0), before


@triton.jit(do_not_specialize=["num_slots"])
def match_terms(
    p0, p1, p2, p3, table_p, heads_p, anchor_p, targets_p,
    place_p, image_p, target_p, first_row_p, first_slot_p,
    link_p, partial_p,
    num_slots, gr, smoothing, cls_pw, obj_pw, gamma,
    LAYERS: tl.constexpr, ANCHORS: tl.constexpr, HEADS: tl.constexpr, CLASSES: tl.constexpr,
    SLOTS: tl.constexpr, AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr, OTHERS: tl.constexpr, WIDTH: tl.constexpr, FOCAL: tl.constexpr,
):  # fmt: skip
    """Box, class and objectness terms of the matches, summed per layer, or per head and layer.

    link, for the backward pass: 2 * (slot of the cell's previous match, or -1, plus 1), plus 1 if this match is the
    cell's last.
    """
    lane = tl.arange(0, COLUMNS)
    sum_index = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH, COLUMNS], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(num_slots, COLUMNS), tl.num_programs(0)):
        slot = block * COLUMNS + lane
        target = tl.load(target_p + slot, mask=slot < num_slots, other=-1)
        valid = target >= 0
        if tl.max(target, 0) >= 0:
            place = tl.load(place_p + slot, mask=valid, other=0)
            image = tl.load(image_p + slot, mask=valid, other=0)
            layer, _, _, _ = unpack(place)
            step = channel_stride(table_p, layer)
            map_p, objectness_p = cell_pointers(p0, p1, p2, p3, table_p, place, image, ANCHORS, HEADS)
            lx, ly, lw, lh, objectness = read_logits(map_p, objectness_p, step, valid)
            anchor_w, anchor_h = anchor_size(anchor_p, place, ANCHORS)
            x, y, w, h = decode(lx, ly, lw, lh, anchor_w, anchor_h)
            true_x, true_y, true_w, true_h = true_box(targets_p, table_p, target, place, valid)
            overlap, _, _, _, _ = ciou(x, y, w, h, true_x, true_y, true_w, true_h)
            last, before = _same_cell(
                slot, place, image, valid, place_p, target_p, first_row_p, first_slot_p, LAYERS, SLOTS, COLUMNS, OTHERS
            )
            tl.store(link_p + slot, (before + 1) * 2 + last.to(tl.int32), mask=valid)
            true_objectness = (1 - gr) + gr * tl.maximum(overlap, 0.0)
            gain = bce(objectness, true_objectness, obj_pw, gamma, FOCAL) - bce(objectness, 0.0, obj_pw, gamma, FOCAL)
            cls = tl.zeros([COLUMNS], tl.float32)
            if CLASSES > 1:
                class_id = tl.load(targets_p + target * 6 + 1, mask=valid, other=0.0).to(tl.int32)[:, None]
                for begin in range(0, CLASSES, AT_ONCE):
                    one_class = begin + tl.arange(0, AT_ONCE)[None, :]
                    there = valid[:, None] & (one_class < CLASSES)
                    there = is_own_class(heads_p, image, one_class, there, HEADS, CLASSES)
                    logit_p = map_p[:, None] + (first_class(HEADS) + one_class) * step[:, None]
                    logit = tl.load(logit_p, mask=there, other=0.0)
                    true_class = tl.where(one_class == class_id, 1 - 0.5 * smoothing, 0.5 * smoothing)
                    loss = bce(logit.to(tl.float32), true_class, cls_pw, gamma, FOCAL)
                    cls += tl.sum(tl.where(there, loss, 0.0), 1)
                cls *= class_share(heads_p, image, HEADS, CLASSES)
            kind = (sum_index % _SUMS)[:, None]
            group = group_of(image, layer, LAYERS, HEADS)
            here = ((sum_index // _SUMS)[:, None] == group[None, :]) & valid[None, :]
            term = tl.where(kind == 0, (1 - overlap)[None, :], tl.where(kind == 1, cls[None, :], 1.0))
            term = tl.where(kind == 2, tl.where(last, gain, 0.0)[None, :], term)
            sums += tl.where(here, term, 0.0)
    tl.store(partial_p + tl.program_id(0) * WIDTH + sum_index, tl.sum(sums, 1))


@triton.jit
def place_of(number, step, FIRST: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr):
    """Memory position of the objectness value with a running number, int64.

    Memory is [groups, CHANNELS, step] in every layout; a group has PLACES adjacent objectness channels, from FIRST on.
    Numbers and step are int32, because dividing wider integers takes longer than everything else.
    """
    channel = (number // (PLACES * step)).to(tl.int64) * CHANNELS + FIRST
    return channel * step + number % (PLACES * step)


@triton.jit(do_not_specialize=["num_images"])
def empty_objectness(
    p0, p1, p2, p3, table_p, heads_p, logits_p, partial_p, num_images, obj_pw, gamma,
    LAYERS: tl.constexpr, ANCHORS: tl.constexpr, HEADS: tl.constexpr, CLASSES: tl.constexpr,
    FIRST: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, FOCAL: tl.constexpr,
):  # fmt: skip
    """Objectness loss of all cells as if they were empty, weighted by head and summed per layer. `match_terms` corrects
    it for the matches. `num_images` is the number of images of the batch, not of head images.

    Cells are read in memory order, and their logits are written contiguously: the backward pass reads those instead of
    every cache line of the maps.
    """
    for layer in tl.static_range(LAYERS):
        columns, rows = layer_sides(table_p, layer)
        num_cells = num_images * (ANCHORS * (HEADS if HEADS > 0 else 1)) * rows * columns
        step = channel_stride(table_p, layer).to(tl.int32)
        map_p = of_layer(layer, p0, p1, p2, p3)
        sums = tl.zeros([BLOCK], tl.float32)
        for block in range(tl.program_id(0), tl.cdiv(num_cells, BLOCK), tl.num_programs(0)):
            number = block * BLOCK + tl.arange(0, BLOCK)
            there = number < num_cells
            at = place_of(number, step, FIRST, PLACES, CHANNELS)
            logit = tl.load(map_p + at, mask=there, other=0.0)
            tl.store(logits_p + number, logit, mask=there)
            weight = head_weight(heads_p, number // step // ANCHORS, HEADS, CLASSES)
            sums += tl.where(there, bce(logit.to(tl.float32), 0.0, obj_pw, gamma, FOCAL) * weight, 0.0)
        logits_p += num_cells
        tl.store(partial_p + tl.program_id(0) * LAYERS + layer, tl.sum(sums, 0))


@triton.jit
def _of_kind(sums_G4, kind: tl.constexpr):
    """One of the sums, for every group."""
    return tl.sum(tl.where(tl.arange(0, _SUMS)[None, :] == kind, sums_G4, 0.0), 1)


@triton.jit(do_not_specialize=["num_images"])
def sum_up(
    table_p, heads_p, balance_p, match_partial_p, empty_partial_p, total_p, items_p, objectness_p, count_p,
    num_images, box_gain, obj_gain, cls_gain,
    LAYERS: tl.constexpr, ANCHORS: tl.constexpr, HEADS: tl.constexpr, CLASSES: tl.constexpr,
    WIDTH: tl.constexpr, PROGRAMS: tl.constexpr, AT_ONCE: tl.constexpr, MATCHES: tl.constexpr,
):  # fmt: skip
    """The loss and its parts from all partial sums, and the number of matches per layer, or per head and layer (not
    without MATCHES). Launched as a single program. `num_images`: of the batch; an image with two heads counts once."""
    program = tl.arange(0, PROGRAMS)
    box = tl.full([], 0.0, tl.float32)
    obj = tl.full([], 0.0, tl.float32)
    cls = tl.full([], 0.0, tl.float32)
    group = tl.arange(0, WIDTH // _SUMS)
    gains = tl.zeros([WIDTH // _SUMS], tl.float32)
    if MATCHES:
        some = tl.arange(0, AT_ONCE)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        sums = tl.zeros([AT_ONCE, WIDTH], tl.float32)
        for begin in range(0, PROGRAMS, AT_ONCE):
            sums += tl.load(match_partial_p + begin * WIDTH + some)
        sums_G4 = tl.reshape(tl.sum(sums, 0), [WIDTH // _SUMS, _SUMS])
        there = group < LAYERS * (HEADS if HEADS > 0 else 1)
        weight = tl.full([WIDTH // _SUMS], 1.0, tl.float32)
        if HEADS > 0:
            weight = tl.load(heads_p + group // LAYERS * (2 + CLASSES), mask=there, other=0.0)
        count = _of_kind(sums_G4, 3)
        share = weight / tl.maximum(count, 1.0)
        box = tl.sum(_of_kind(sums_G4, 0) * share, 0)
        cls = tl.sum(_of_kind(sums_G4, 1) * share, 0)
        gains = _of_kind(sums_G4, 2) * weight
        tl.store(count_p + group, count, mask=there)
    for layer in tl.static_range(LAYERS):
        columns, rows = layer_sides(table_p, layer)
        objectness = tl.sum(tl.load(empty_partial_p + program * LAYERS + layer), 0)
        objectness += tl.sum(tl.where(group % LAYERS == layer, gains, 0.0), 0)
        objectness = objectness / (num_images * ANCHORS * rows * columns)
        obj += objectness * tl.load(balance_p + layer)
        tl.store(objectness_p + layer, objectness)
    box *= box_gain
    obj *= obj_gain
    cls *= cls_gain
    tl.store(items_p, box)
    tl.store(items_p + 1, obj)
    tl.store(items_p + 2, cls)
    tl.store(items_p + 3, box + obj + cls)
    tl.store(total_p, (box + obj + cls) * num_images)


# Backward pass: the gradient of the maps, in one pass over their memory
#
# First the gradient as if every cell were empty; then the last match of each matched cell writes all channels of the
# cell, with the sum over all its matches. Each value has one writer and a fixed order: the same bits every time.


@triton.jit
def _num_before(at, step, FIRST: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr):
    """How many objectness values precede a memory position, int32: the inverse of `place_of`."""
    group = (at // (CHANNELS * step)).to(tl.int32)
    rest = (at % (CHANNELS * step)).to(tl.int32)
    return group * (PLACES * step) + tl.minimum(tl.maximum(rest - FIRST * step, 0), PLACES * step)


@triton.jit(do_not_specialize=["num_images"])
def empty_gradient(
    g0, g1, g2, g3, table_p, heads_p, logits_p, balance_p, upstream_p,
    num_images, obj_gain, obj_pw, gamma,
    LAYERS: tl.constexpr, ANCHORS: tl.constexpr, HEADS: tl.constexpr, CLASSES: tl.constexpr,
    FIRST: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, FOCAL: tl.constexpr,
):  # fmt: skip
    """Write the whole gradient as if all cells were empty: zeros, and in the same pass the gradient of objectness.

    A program writes BLOCK values of one layer, in memory order; `empty_objectness` wrote the logits in that order too.
    A pixel has GROUPS groups of CHANNELS: one per anchor, or a single one in joined maps of several heads. Clearing
    first and writing the objectness in another kernel would bring every line of the map through the cache twice.
    """
    block = tl.program_id(0)
    for layer in tl.static_range(LAYERS):
        columns, rows = layer_sides(table_p, layer)
        num_numbers = num_images.to(tl.int64) * (GROUPS * CHANNELS) * rows * columns
        num_blocks = tl.cdiv(num_numbers, BLOCK).to(tl.int32)
        if (block >= 0) & (block < num_blocks):
            grad_p = of_layer(layer, g0, g1, g2, g3)
            begin = block.to(tl.int64) * BLOCK
            end = tl.minimum(begin + BLOCK, num_numbers)
            at = begin + tl.arange(0, BLOCK)
            nothing = tl.zeros([BLOCK], grad_p.dtype.element_ty)
            if begin + BLOCK <= num_numbers:  # without a mask the stores are 16 bytes wide
                tl.store(grad_p + at, nothing)
            else:
                tl.store(grad_p + at, nothing, mask=at < num_numbers)
            tl.debug_barrier()  # all threads must have written their zeros
            # The number of images cancels: the loss is multiplied by it, the mean divides by it.
            scale = tl.load(upstream_p) * obj_gain * tl.load(balance_p + layer) / (ANCHORS * rows * columns)
            step = channel_stride(table_p, layer).to(tl.int32)
            number = _num_before(begin, step, FIRST, PLACES, CHANNELS)
            while place_of(number, step, FIRST, PLACES, CHANNELS) < end:
                lanes = number + tl.arange(0, LANES)
                cell_at = place_of(lanes, step, FIRST, PLACES, CHANNELS)
                logit = tl.load(logits_p + lanes, mask=cell_at < end, other=0.0).to(tl.float32)
                weight = head_weight(heads_p, lanes // step // ANCHORS, HEADS, CLASSES)
                gradient = scale * weight * bce_gradient(logit, 0.0, obj_pw, gamma, FOCAL)
                tl.store(grad_p + cell_at, gradient.to(grad_p.dtype.element_ty), mask=cell_at < end)
                number += LANES
        block -= num_blocks
        logits_p += num_images * (ANCHORS * (HEADS if HEADS > 0 else 1)) * rows * columns


@triton.jit(do_not_specialize=["num_slots", "num_images"])
def match_gradient(
    p0, p1, p2, p3, g0, g1, g2, g3, table_p, heads_p, anchor_p, targets_p,
    place_p, image_p, target_p, link_p, balance_p, count_p, upstream_p,
    num_slots, num_images, box_gain, obj_gain, cls_gain, gr, smoothing, cls_pw, obj_pw, gamma,
    LAYERS: tl.constexpr, ANCHORS: tl.constexpr, HEADS: tl.constexpr, CLASSES: tl.constexpr,
    AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr, FOCAL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of every channel of the matched cells to g0..g3, summed over a cell's matches."""
    lane = tl.arange(0, COLUMNS)
    upstream = tl.load(upstream_p)
    for block in range(tl.program_id(0), tl.cdiv(num_slots, COLUMNS), tl.num_programs(0)):
        slot = block * COLUMNS + lane
        target = tl.load(target_p + slot, mask=slot < num_slots, other=-1)
        link = tl.load(link_p + slot, mask=target >= 0, other=0)
        writes = (link & 1) == 1
        if tl.max(link & 1, 0) > 0:
            place = tl.load(place_p + slot, mask=writes, other=0)
            image = tl.load(image_p + slot, mask=writes, other=0)
            layer, _, _, _ = unpack(place)
            columns, rows = layer_sides(table_p, layer)
            step = channel_stride(table_p, layer)
            weighted = upstream * head_weight(heads_p, image, HEADS, CLASSES)
            group = group_of(image, layer, LAYERS, HEADS)
            share = weighted * num_images / tl.maximum(tl.load(count_p + group), 1.0)
            map_p, objectness_p = cell_pointers(p0, p1, p2, p3, table_p, place, image, ANCHORS, HEADS)
            grad_p, by_objectness_p = cell_pointers(g0, g1, g2, g3, table_p, place, image, ANCHORS, HEADS)
            anchor_w, anchor_h = anchor_size(anchor_p, place, ANCHORS)
            true_x, true_y, true_w, true_h = true_box(targets_p, table_p, target, place, writes)
            lx, ly, lw, lh, objectness = read_logits(map_p, objectness_p, step, writes)
            x, y, w, h = decode(lx, ly, lw, lh, anchor_w, anchor_h)
            overlap, by_x, by_y, by_w, by_h = ciou(x, y, w, h, true_x, true_y, true_w, true_h)
            true_objectness = (1 - gr) + gr * tl.maximum(overlap, 0.0)
            by_objectness = weighted * obj_gain * tl.load(balance_p + layer) / (ANCHORS * rows * columns)
            by_objectness *= bce_gradient(objectness, true_objectness, obj_pw, gamma, FOCAL)
            # The earlier matches of the cell, from last to first.
            before = (link >> 1) - 1
            while tl.max(before, 0) >= 0:
                more = before >= 0
                other = tl.load(target_p + before, mask=more, other=0)
                true_x, true_y, true_w, true_h = true_box(targets_p, table_p, other, place, more)
                _overlap, more_x, more_y, more_w, more_h = ciou(x, y, w, h, true_x, true_y, true_w, true_h)
                by_x += tl.where(more, more_x, 0.0)
                by_y += tl.where(more, more_y, 0.0)
                by_w += tl.where(more, more_w, 0.0)
                by_h += tl.where(more, more_h, 0.0)
                before = (tl.load(link_p + before, mask=more, other=0) >> 1) - 1
            dx, dy, dw, dh = decode_gradient(lx, ly, lw, lh, anchor_w, anchor_h)
            scale = -box_gain * share
            kind = grad_p.dtype.element_ty
            tl.store(grad_p, (scale * by_x * dx).to(kind), mask=writes)
            tl.store(grad_p + step, (scale * by_y * dy).to(kind), mask=writes)
            tl.store(grad_p + 2 * step, (scale * by_w * dw).to(kind), mask=writes)
            tl.store(grad_p + 3 * step, (scale * by_h * dh).to(kind), mask=writes)
            tl.store(by_objectness_p, by_objectness.to(kind), mask=writes)
            if CLASSES > 1:
                scale = cls_gain * share * class_share(heads_p, image, HEADS, CLASSES)
                for begin in range(0, CLASSES, AT_ONCE):
                    one_class = begin + tl.arange(0, AT_ONCE)[None, :]
                    there = writes[:, None] & (one_class < CLASSES)
                    there = is_own_class(heads_p, image, one_class, there, HEADS, CLASSES)
                    channel = (first_class(HEADS) + one_class) * step[:, None]
                    logit = tl.load(map_p[:, None] + channel, mask=there, other=0.0).to(tl.float32)
                    gradient = tl.zeros([COLUMNS, AT_ONCE], tl.float32)
                    now = tl.where(writes, slot, -1)
                    while tl.max(now, 0) >= 0:
                        more = now >= 0
                        other = tl.load(target_p + now, mask=more, other=0)
                        class_id = tl.load(targets_p + other * 6 + 1, mask=more, other=0.0).to(tl.int32)
                        true_class = tl.where(one_class == class_id[:, None], 1 - 0.5 * smoothing, 0.5 * smoothing)
                        one = bce_gradient(logit, true_class, cls_pw, gamma, FOCAL)
                        gradient += tl.where(more[:, None], one, 0.0)
                        now = (tl.load(link_p + now, mask=more, other=0) >> 1) - 1
                    tl.store(grad_p[:, None] + channel, (scale[:, None] * gradient).to(kind), mask=there)
