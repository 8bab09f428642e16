"""GPU kernels that add a step's targets to the sums per label: twins of the torch operations in in_step.py.

    match slots --score_matches--> [T, 8] per target --add_targets--> sums per label

A program skips its slots if all are empty, and reads a matched cell in its own layer only. Maps of one head or of
several, as in the kernels of the loss, whose functions find and read the cells. Sums are atomic: their last bits depend
on the order in which programs run.

Dimension key:  T targets, or labels of the data set   M slots for matches   K columns of sums
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels import start
from flatout.yolo.label_audit.rank import CLASS_IOU, SAME_OBJECT, SAME_PLACE
from flatout.yolo.label_audit.statistics import CLASS_BITS, COLUMNS, SCORE_UNITS
from flatout.yolo.loss.kernel_support import layer_table
from flatout.yolo.loss.kernels_loss import anchor_size, cell_pointers, class_share, read_logits, true_box
from flatout.yolo.loss.kernels_math import (
    bce,
    channel_stride,
    ciou,
    decode,
    first_class,
    is_own_class,
    overlap,
    unpack,
)
from flatout.yolo.loss.losses import Assigned, LossConfig
from flatout.yolo.loss.matches import Anchors
from flatout.yolo.loss.on_device import classes_at_once, contiguous_float, four_maps, outputs_of
from flatout.yolo.multihead.joined_maps import num_classes

SLOTS_AT_ONCE, TARGETS_AT_ONCE = 8, 128


def add_on_device(
    sum_TK: Tensor,
    confused_T: Tensor,
    maps: Sequence[Tensor],
    assigned: Assigned,
    label_T1: Tensor,
    anchors: Anchors,
    config: LossConfig,
) -> None:
    """`LabelSums.add` by three kernels, one of which clears the columns of the targets."""
    target_T6, matches, heads = assigned
    num_slots, num_targets, most_classes = len(matches.target_M), len(target_T6), num_classes(maps, heads)
    if not num_slots:
        return
    targets_T6 = contiguous_float(target_T6)
    # The columns of sums, but the number of cells in place of `seen`; then the confusion, and nothing.
    found_T8 = torch.zeros((num_targets, 8), dtype=torch.int32, device=target_T6.device)
    start(
        score_matches,
        -(-num_slots // SLOTS_AT_ONCE),
        *four_maps(maps),
        layer_table(maps, outputs_of(heads)),
        found_T8 if heads is None else heads.table_HF,
        contiguous_float(anchors.size_LA2),
        targets_T6,
        *matches[:3],
        found_T8,
        found_T8.view(torch.float32),
        num_slots,
        *(config.gr, config.label_smoothing, config.cls_pw, config.obj_pw, config.fl_gamma),
        *(config.box, config.obj, config.cls),
        ANCHORS=anchors.size_LA2.shape[1],
        HEADS=0 if heads is None else heads.num,
        CLASSES=most_classes,
        CONFUSED=heads is None and most_classes <= 1 << CLASS_BITS,
        FOCAL=config.fl_gamma > 0,
        AT_ONCE=classes_at_once(most_classes),
        BLOCK=SLOTS_AT_ONCE,
        num_warps=2,
    )
    start(
        add_targets,
        -(-num_targets // TARGETS_AT_ONCE),
        targets_T6,
        label_T1.contiguous(),
        found_T8,
        found_T8.view(torch.float32),
        sum_TK,
        confused_T,
        num_targets,
        BLOCK=TARGETS_AT_ONCE,
    )


_SEEN: tl.constexpr = tl.constexpr(COLUMNS.index("seen"))
_OWN: tl.constexpr = tl.constexpr(COLUMNS.index("own"))
_NEAR: tl.constexpr = tl.constexpr(COLUMNS.index("near"))
_OTHER: tl.constexpr = tl.constexpr(COLUMNS.index("other"))
_IOU: tl.constexpr = tl.constexpr(COLUMNS.index("iou"))
_LOSS: tl.constexpr = tl.constexpr(COLUMNS.index("loss"))
_NUM_COLUMNS: tl.constexpr = tl.constexpr(len(COLUMNS))
_CONFUSION: tl.constexpr = tl.constexpr(len(COLUMNS))
_WIDTH: tl.constexpr = tl.constexpr(8)
_PLACE_LOW: tl.constexpr = tl.constexpr(SAME_PLACE.low)
_PLACE_HIGH: tl.constexpr = tl.constexpr(SAME_PLACE.high)
_OBJECT_LOW: tl.constexpr = tl.constexpr(SAME_OBJECT.low)
_OBJECT_HIGH: tl.constexpr = tl.constexpr(SAME_OBJECT.high)
_CLASS_IOU: tl.constexpr = tl.constexpr(CLASS_IOU)
_CLASS_BITS: tl.constexpr = tl.constexpr(CLASS_BITS)
_SCORE_UNITS: tl.constexpr = tl.constexpr(SCORE_UNITS)


@triton.jit
def _ramp(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.minimum(tl.maximum((x - LOW) / (HIGH - LOW), 0.0), 1.0)


@triton.jit
def _keep_larger(best_p, score, valid):
    """Replace smaller scores. Non-negative floats compare like their bits, and integers have an atomic maximum."""
    tl.atomic_max(best_p, score.to(tl.int32, bitcast=True), mask=valid, sem="relaxed")


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["targets_p", "image_p"])
def score_matches(
    p0, p1, p2, p3, table_p, heads_p, anchor_p, targets_p,
    place_p, image_p, target_p,
    found_p, sum_p,
    num_slots, gr, smoothing, cls_pw, obj_pw, gamma, box_gain, obj_gain, cls_gain,
    ANCHORS: tl.constexpr, HEADS: tl.constexpr, CLASSES: tl.constexpr,
    CONFUSED: tl.constexpr, FOCAL: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Collect per target the best scores of its cells, their losses and their number; see `in_step.target_terms`.

    found and sum are the same memory, as int32 and as float32.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
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
        iou = overlap(
            x - w / 2, y - h / 2, x + w / 2, y + h / 2,
            true_x - true_w / 2, true_y - true_h / 2, true_x + true_w / 2, true_y + true_h / 2,
        )  # fmt: skip
        complete_iou, _, _, _, _ = ciou(x, y, w, h, true_x, true_y, true_w, true_h)

        sure = tl.sigmoid(objectness)
        own, other, cls = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        other_class = tl.zeros([BLOCK], tl.int32)
        if CLASSES == 1:  # the confidence of a network with one class is its objectness
            own += sure
        else:
            class_id = tl.load(targets_p + target * 6 + 1, mask=valid, other=0.0).to(tl.int32)
            class_id = tl.minimum(tl.maximum(class_id, 0), CLASSES - 1)[:, None]
            for begin in range(0, CLASSES, AT_ONCE):
                one_class = begin + tl.arange(0, AT_ONCE)[None, :]
                there = valid[:, None] & (one_class < CLASSES)
                there = is_own_class(heads_p, image, one_class, there, HEADS, CLASSES)
                logit_p = map_p[:, None] + (first_class(HEADS) + one_class) * step[:, None]
                logit = tl.load(logit_p, mask=there, other=0.0).to(tl.float32)
                true_class = tl.where(one_class == class_id, 1 - 0.5 * smoothing, 0.5 * smoothing)
                cls += tl.sum(tl.where(there, bce(logit, true_class, cls_pw, gamma, FOCAL), 0.0), 1)
                score = tl.where(there, sure[:, None] * tl.sigmoid(logit), 0.0)
                own += tl.sum(tl.where(one_class == class_id, score, 0.0), 1)
                most, at = tl.max(tl.where(one_class == class_id, 0.0, score), 1, return_indices=True)
                other_class = tl.where(most > other, begin + at, other_class)
                other = tl.maximum(other, most)
            cls *= class_share(heads_p, image, HEADS, CLASSES)
        true_objectness = (1 - gr) + gr * tl.maximum(complete_iou, 0.0)
        loss = box_gain * (1 - complete_iou) + cls_gain * cls
        loss += obj_gain * bce(objectness, true_objectness, obj_pw, gamma, FOCAL)
        near = tl.maximum(own, other) * _ramp(iou, _OBJECT_LOW, _OBJECT_HIGH)
        other = tl.where(iou >= _CLASS_IOU, other, 0.0)

        row = target * _WIDTH
        tl.atomic_add(found_p + row + _SEEN, 1, mask=valid, sem="relaxed")
        _keep_larger(found_p + row + _OWN, own * _ramp(iou, _PLACE_LOW, _PLACE_HIGH), valid)
        _keep_larger(found_p + row + _NEAR, near, valid)
        _keep_larger(found_p + row + _OTHER, other, valid)
        _keep_larger(found_p + row + _IOU, iou, valid)
        tl.atomic_add(sum_p + row + _LOSS, loss, mask=valid, sem="relaxed")
        if CONFUSED:  # like in_step.pack_confusion
            units = (other * _SCORE_UNITS).to(tl.int32)
            packed = (units << _CLASS_BITS) | other_class
            tl.atomic_max(found_p + row + _CONFUSION, packed, mask=valid & (units > 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_targets"], do_not_specialize_on_alignment=["targets_p", "label_p"])
def add_targets(
    targets_p, label_p, found_p, sum_p, label_sum_p, confused_p, num_targets, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the targets with a label, a cell and a finite loss to the sums of their labels; found and sum as in
    `score_matches`."""
    target = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = target < num_targets
    label = tl.load(label_p + target, mask=there, other=-1).to(tl.int64)
    image = tl.load(targets_p + target * 6, mask=there, other=-1.0)
    row = target * _WIDTH
    num_cells = tl.load(found_p + row + _SEEN, mask=there, other=0)
    counts = (label >= 0) & (image >= 0) & (num_cells > 0)
    loss = tl.load(sum_p + row + _LOSS, mask=counts, other=0.0) / tl.maximum(num_cells, 1).to(tl.float32)
    counts &= tl.abs(loss) < float("inf")  # false for nan, too
    to = label_sum_p + label * _NUM_COLUMNS
    tl.atomic_add(to + _SEEN, 1.0, mask=counts, sem="relaxed")
    for column in tl.static_range(_OWN, _IOU + 1):
        tl.atomic_add(to + column, tl.load(sum_p + row + column, mask=counts, other=0.0), mask=counts, sem="relaxed")
    tl.atomic_add(to + _LOSS, loss, mask=counts, sem="relaxed")
    confused = tl.load(found_p + row + _CONFUSION, mask=counts, other=0)
    tl.atomic_max(confused_p + label, confused, mask=counts & (confused > 0), sem="relaxed")
