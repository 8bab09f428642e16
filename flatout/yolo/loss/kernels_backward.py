# mypy: disable-error-code="no-untyped-def"
"""GPU kernels of the loss's backward pass: the gradient of the maps, in one pass over their memory.

First the gradient as if every cell were empty; then the last match of each matched cell writes the cell's whole row,
with the sum over all its matches. One writer per number and a fixed order: the same bits every time.
Function arguments that end in _p are pointers.
"""

import triton
import triton.language as tl

from flatout.yolo.assign.kernels_layers import channel_stride, first_class, is_own_class, layer_sides, of_layer, unpack
from flatout.yolo.loss.kernels_forward import (
    anchor_size,
    cell_pointers,
    class_share,
    group_of,
    head_weight,
    place_of,
    read_logits,
    true_box,
)
from flatout.yolo.loss.kernels_math import bce_gradient, ciou, decode, decode_gradient


@triton.jit
def _num_before(at, step, FIRST: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr):
    """How many objectness numbers come before a place in memory, int32: the other way round than `place_of`."""
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
    """The whole gradient as if nothing were there: zeros, and in the same pass what objectness gets in every cell.

    A program writes BLOCK numbers of one layer, in the order of memory; `empty_objectness` has left the logits in that
    order too. A pixel has GROUPS groups of CHANNELS: one per anchor, or a single one in joined maps. Clearing first and
    writing the objectness by another kernel would bring every line of the map through the cache twice.
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
            tl.debug_barrier()  # the zeros of all threads come before what follows
            # The loss carries the number of images, the mean divides by it.
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
    """Gradient of all channels of the matched cells."""
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
            # The matches of the cell before the last one, backwards.
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
