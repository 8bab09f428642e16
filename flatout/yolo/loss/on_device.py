"""Assignment and loss by GPU kernels, without making the host wait and without copying a map.

    assignment    targets --group_rows--> rows by image --list_columns--> candidates in slots
                          --read_columns--> predictions there --take_columns--> choices --settle_contested--> owners
    loss          forward reads the objectness of each map once, keeps it, and reads the matched cells once;
                  backward writes the gradient in one pass, then the matched cells over it

All shapes depend on the number of targets only. Memory: slots_per_target (45 for three layers) x T slots of about 60
bytes; pairs of targets and candidates are never stored.

Dimension key:  T targets   B images, or head images (multihead/joined_maps.py)   L layers   A anchors   H heads
                M slots for matches   S objectness logits of all layers   G = L x heads groups of matches
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.kernels import start
from flatout.yolo.loss import kernels_assign, kernels_loss
from flatout.yolo.loss.kernel_support import MAX_KERNEL_LAYERS, constants, layer_table
from flatout.yolo.loss.losses import LossConfig, LossParts
from flatout.yolo.loss.matches import Anchors, Matches, Search, Spans
from flatout.yolo.multihead.head_config import OBJECTNESS
from flatout.yolo.multihead.joined_maps import Heads, num_classes, num_images

NUM_OFFSETS = 5
"""Offsets of candidate cells from the target's centre cell: none, left, up, right, down ("kinds" in the kernels)."""

PROGRAMS = 2048
"""Programs of the kernels that loop over slots: several for every multiprocessor of current GPUs."""


# Assignment


def route_on_device(targets_T6: Tensor, heads: Heads) -> Tensor:
    """`joined_maps.route` in one kernel instead of ten."""
    routed_T6 = torch.empty_like(targets_T6, dtype=torch.float32, memory_format=torch.contiguous_format)
    if len(targets_T6):
        start(
            kernels_assign.route_rows,
            -(-len(targets_T6) // 256),
            contiguous_float(targets_T6),
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
    """Every candidate in its slot, with its target; pass `heads` if the maps are joined."""
    num_layers, num_anchors, _ = anchors.size_LA2.shape
    num = num_images(maps, heads)
    spans = _group_targets(contiguous_float(targets_T6), num, NUM_OFFSETS * num_anchors * num_layers, num_layers)
    num_slots = spans.slots_per_target * len(targets_T6)
    packed_M, image_M = spans.image_T.new_empty(2, num_slots)
    target_M = spans.image_T.new_full((num_slots,), -1)
    if num_slots:
        start(
            kernels_assign.list_columns,
            num,
            contiguous_float(targets_T6),
            spans.row_T,
            spans.first_row_B,
            layer_table(maps),
            contiguous_float(anchors.size_LA2),
            packed_M,
            image_M,
            target_M,
            spans.first_slot_BL,
            search.anchor_t,
            search.reach,
            LAYERS=num_layers,
            ANCHORS=num_anchors,
            SLOTS=spans.slots_per_target,
            KINDS=power_of_two(NUM_OFFSETS * num_anchors),
            # A head image has the targets of one head only: small programs, all of them running at once.
            ROWS=32 if heads is None else 8,
            num_warps=4 if heads is None else 1,
        )
    return Matches(packed_M, image_M, target_M, spans=spans)


def ota_on_device(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, search: Search, heads: Heads | None = None
) -> Matches:
    """The OTA matches, in the slots of their candidates."""
    candidates = list_on_device(maps, targets_T6, anchors, search, heads)
    num_taken_T = targets_T6.new_zeros(len(targets_T6), dtype=torch.int32)
    if not len(targets_T6):
        return candidates._replace(num_taken_T=num_taken_T)
    spans = candidates.spans
    assert spans is not None
    columns = _read_predictions(maps, candidates, anchors, heads)
    num_slots, most_classes = len(candidates.packed_M), num_classes(maps, heads)
    num_takers_M = torch.zeros_like(candidates.target_M)
    owner_M = torch.full_like(candidates.target_M, -1)
    height_px = maps[0].shape[2] * anchors.strides_px[0]
    maps_and_targets = (*four_maps(maps), layer_table(maps), contiguous_float(targets_T6))
    start(
        kernels_assign.take_columns,
        len(targets_T6),
        *maps_and_targets,
        spans.row_T,
        spans.image_T,
        spans.first_row_B,
        spans.first_slot_BL,
        candidates.packed_M,
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
        candidates.packed_M,
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


def _group_targets(targets_T6: Tensor, batch_size: int, slots_per_target: int, num_layers: int) -> Spans:
    """Sort the targets by image; `first_slot_BL` is left uninitialised."""
    image_T = targets_T6[:, 0].to(torch.int32)
    row_T = torch.empty_like(image_T)
    first_row_B = image_T.new_empty(batch_size + 1)
    start(kernels_assign.group_rows, batch_size + 1, image_T, row_T, first_row_B, len(image_T), BLOCK=1024)
    return Spans(slots_per_target, image_T, row_T, first_row_B, image_T.new_empty(batch_size, num_layers + 1))


def _read_predictions(
    maps: Sequence[Tensor], candidates: Matches, anchors: Anchors, heads: Heads | None
) -> tuple[Tensor, ...]:
    """Predictions at the candidates: offset [M], box [4, M], objectness and cost of no class [M]; see
    kernels_assign.read_columns."""
    num_slots, most_classes = len(candidates.packed_M), num_classes(maps, heads)
    numbers_6M = maps[0].new_empty(6, num_slots, dtype=torch.float32)
    offset_M = candidates.packed_M.new_empty(num_slots, dtype=torch.int64)
    columns = (offset_M, numbers_6M[:4], numbers_6M[4], numbers_6M[5])
    start(
        kernels_assign.read_columns,
        PROGRAMS,
        *four_maps(maps),
        layer_table(maps, outputs_of(heads)),
        numbers_6M if heads is None else heads.table_HF,
        contiguous_float(anchors.size_LA2),
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


# Arguments of the kernels


def outputs_of(heads: Heads | None) -> tuple[int, ...]:
    """Outputs per anchor of each head of joined maps; empty for maps of a single head."""
    return () if heads is None else heads.groups.outputs_H


def four_maps(maps: Sequence[Tensor]) -> list[Tensor]:
    """The maps for the kernels' four pointers; the last map is repeated in place of missing ones."""
    return [*maps, *[maps[-1]] * (MAX_KERNEL_LAYERS - len(maps))]


def contiguous_float(numbers: Tensor) -> Tensor:
    """The tensor as kernels read it: float32, contiguous. Usually the tensor itself."""
    return numbers.float().contiguous()


def classes_at_once(num_classes: int) -> int:
    """Number of classes that a kernel holds in registers at a time."""
    return min(128, power_of_two(num_classes))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


# Loss

GRADIENT_BLOCK = 4096
"""Values of the gradient that a program writes."""


def device_head_loss(
    maps: Sequence[Tensor],
    targets_T6: Tensor,
    matches: Matches,
    anchors: Anchors,
    config: LossConfig,
    balance_L: Tensor,
    weight: float,
    heads: Heads | None = None,
) -> LossParts:
    """`head_loss` for matches in slots, as the functions above return them; pass `heads` if the maps are joined."""
    assert matches.spans is not None
    dense = [each if _is_dense(each) else each.contiguous() for each in maps]
    num_anchors = anchors.size_LA2.shape[1]
    inputs = _LossInputs(
        dense,
        layer_table(dense, outputs_of(heads)),
        balance_L if heads is None else heads.table_HF,
        contiguous_float(anchors.size_LA2),
        contiguous_float(targets_T6),
        *matches[:3],
        balance_L,
    )
    sizes = _KernelSizes(
        LAYERS=len(dense),
        ANCHORS=num_anchors,
        HEADS=0 if heads is None else heads.num,
        CLASSES=num_classes(dense, heads),
    )
    return LossParts(*_HeadLoss.apply(config, weight, matches.spans, sizes, *_flatten(inputs)))


def _is_dense(one_map: Tensor) -> bool:
    """Whether the map fills its memory without gaps, in any order of axes: its gradient then has the same strides."""
    filled = 1
    for stride, size in sorted(zip(one_map.stride(), one_map.shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


class _LossInputs(NamedTuple):
    """The tensors that the kernels of the loss read."""

    maps: list[Tensor]
    table: Tensor
    heads_HF: Tensor
    """`Heads.table_HF` for joined maps; any tensor otherwise."""
    anchors_LA2: Tensor
    targets_T6: Tensor
    packed_M: Tensor
    image_M: Tensor
    target_M: Tensor
    balance_L: Tensor

    @property
    def of_matches(self) -> tuple[Tensor, ...]:
        """Everything but maps and balance, in the order in which the kernels of the matches take it."""
        return tuple(self[1:-1])


class _KernelSizes(NamedTuple):
    """Constants of the kernels, under the names of the kernels' parameters."""

    LAYERS: int
    ANCHORS: int
    HEADS: int
    """Number of heads of joined maps; 0 for the maps of a single head."""
    CLASSES: int

    @property
    def num_heads(self) -> int:
        return max(self.HEADS, 1)

    @property
    def groups(self) -> int:
        """Groups of channels per pixel: one per anchor, or a single one in joined maps."""
        return 1 if self.HEADS else self.ANCHORS

    def objectness(self, maps: list[Tensor]) -> dict[str, int]:
        """Position of objectness in a group of channels, as constants of the kernels."""
        if self.HEADS:
            channels, places = maps[0].shape[1], self.HEADS * self.ANCHORS
            return {"FIRST": channels - places, "PLACES": places, "CHANNELS": channels}
        return {"FIRST": OBJECTNESS, "PLACES": 1, "CHANNELS": maps[0].shape[4]}

    @property
    def sums_width(self) -> int:
        """Number of partial sums per program."""
        return kernels_loss.SUMS * power_of_two(self.LAYERS * self.num_heads)


class _Loss(NamedTuple):
    """A loss to compute, and the numbers that its kernels share."""

    inputs: _LossInputs
    sizes: _KernelSizes
    config: LossConfig
    weight: float

    @property
    def num_images(self) -> int:
        return self.inputs.maps[0].shape[0]

    @property
    def gains(self) -> tuple[float, float, float]:
        """Gains of the box, objectness and class losses."""
        config, weight = self.config, self.weight
        return config.box * weight, config.obj * weight, config.cls * weight

    @property
    def of_terms(self) -> tuple[float, ...]:
        """Numbers of the class and objectness terms; the last two are those of objectness."""
        config = self.config
        return config.gr, config.label_smoothing, config.cls_pw, config.obj_pw, config.fl_gamma

    @property
    def constants(self) -> dict[str, int]:
        """Constants of all kernels but the one that sums up."""
        return {**self.sizes._asdict(), "FOCAL": self.config.fl_gamma > 0}


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, config: LossConfig, weight: float, spans: Spans, sizes: _KernelSizes, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss = _Loss(_unflatten(tensors), sizes, config, weight)
        link_M = torch.empty_like(loss.inputs.packed_M)
        empty_sums, logits_S = _sum_empty(loss)
        match_sums = _sum_matches(loss, spans, link_M)
        total, items, obj_L, count_G = _add_up(loss, empty_sums, match_sums)
        ctx.save_for_backward(link_M, count_G, logits_S, *tensors)
        ctx.config, ctx.weight, ctx.sizes = config, weight, sizes
        ctx.mark_non_differentiable(items, obj_L)
        ctx.set_materialize_grads(False)
        return total, items, obj_L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        link_M, count_G, logits_S, *tensors = ctx.saved_tensors
        loss = _Loss(_unflatten(tensors), ctx.sizes, ctx.config, ctx.weight)
        grads = [torch.empty_like(each) for each in loss.inputs.maps]
        _write_empty(loss, grads, upstream, logits_S)
        _write_matches(loss, grads, upstream, link_M, count_G)
        return (None, None, None, None, *[None] * (len(tensors) - len(grads)), *grads)


def _flatten(inputs: _LossInputs) -> list[Tensor]:
    """All tensors in a flat list, the maps last: autograd needs each as an argument."""
    return [*inputs[1:], *inputs.maps]


def _unflatten(tensors: Sequence[Tensor]) -> _LossInputs:
    others = len(_LossInputs._fields) - 1
    return _LossInputs(list(tensors[others:]), *tensors[:others])


def _sum_empty(loss: _Loss) -> tuple[Tensor, Tensor]:
    """Objectness loss of all cells as if they were empty: partial sums [programs, L]. Also returns the logits of all
    cells [S], in memory order."""
    inputs, where = loss.inputs, loss.sizes.objectness(loss.inputs.maps)
    sums = inputs.balance_L.new_empty(PROGRAMS * len(inputs.maps))
    num_groups = sum(each.numel() for each in inputs.maps) // where["CHANNELS"]
    logits_S = inputs.maps[0].new_empty(num_groups * where["PLACES"])
    start(
        kernels_loss.empty_objectness,
        PROGRAMS,
        *four_maps(inputs.maps),
        inputs.table,
        inputs.heads_HF,
        logits_S,
        sums,
        loss.num_images,
        *loss.of_terms[-2:],
        **loss.constants,
        **where,
        BLOCK=512,
    )
    return sums, logits_S


def _sum_matches(loss: _Loss, spans: Spans, link_M: Tensor) -> Tensor | None:
    """Terms of the matches: partial sums [programs, heads x layers x SUMS], or None without targets. Fills link_M."""
    if not len(link_M):
        return None
    width = loss.sizes.sums_width
    sums = loss.inputs.balance_L.new_empty(PROGRAMS * width)
    start(
        kernels_loss.match_terms,
        PROGRAMS,
        *four_maps(loss.inputs.maps),
        *loss.inputs.of_matches,
        spans.first_row_B,
        spans.first_slot_BL,
        link_M,
        sums,
        len(link_M),
        *loss.of_terms,
        **loss.constants,
        SLOTS=spans.slots_per_target,
        AT_ONCE=classes_at_once(loss.sizes.CLASSES),
        COLUMNS=8,
        OTHERS=64,
        WIDTH=width,
        num_warps=2,
    )
    return sums


def _add_up(loss: _Loss, empty_sums: Tensor, match_sums: Tensor | None) -> tuple[Tensor, ...]:
    """Total, items, objectness loss per layer, and number of matches per layer, or per head and layer."""
    inputs, sizes = loss.inputs, loss.sizes
    shapes = ((), (4,), (sizes.LAYERS,), (sizes.LAYERS * sizes.num_heads,))
    results = tuple(inputs.balance_L.new_empty(shape) for shape in shapes)
    start(
        kernels_loss.sum_up,
        1,
        inputs.table,
        inputs.heads_HF,
        inputs.balance_L,
        empty_sums if match_sums is None else match_sums,
        empty_sums,
        *results,
        loss.num_images,
        *loss.gains,
        **sizes._asdict(),
        WIDTH=sizes.sums_width,
        PROGRAMS=PROGRAMS,
        AT_ONCE=min(PROGRAMS, 8192 // sizes.sums_width),
        MATCHES=match_sums is not None,
        num_warps=8,
    )
    return results


def _write_empty(loss: _Loss, grads: list[Tensor], upstream: Tensor, logits_S: Tensor) -> None:
    """Write the whole gradient as if all cells were empty."""
    inputs, where = loss.inputs, loss.sizes.objectness(loss.inputs.maps)
    start(
        kernels_loss.empty_gradient,
        sum(-(-each.numel() // GRADIENT_BLOCK) for each in grads),
        *four_maps(grads),
        inputs.table,
        inputs.heads_HF,
        logits_S,
        inputs.balance_L,
        upstream,
        loss.num_images,
        loss.gains[1],
        *loss.of_terms[-2:],
        **loss.constants,
        **where,
        GROUPS=loss.sizes.groups,
        BLOCK=GRADIENT_BLOCK,
        LANES=power_of_two(GRADIENT_BLOCK * where["PLACES"] // where["CHANNELS"] + 1),
    )


def _write_matches(loss: _Loss, grads: list[Tensor], upstream: Tensor, link_M: Tensor, count_G: Tensor) -> None:
    """Overwrite the matched cells in the gradient that `_write_empty` wrote."""
    if not len(link_M):
        return
    start(
        kernels_loss.match_gradient,
        PROGRAMS,
        *four_maps(loss.inputs.maps),
        *four_maps(grads),
        *loss.inputs.of_matches,
        link_M,
        loss.inputs.balance_L,
        count_G,
        upstream,
        len(link_M),
        loss.num_images,
        *loss.gains,
        *loss.of_terms,
        **loss.constants,
        AT_ONCE=classes_at_once(loss.sizes.CLASSES),
        COLUMNS=8,
        num_warps=2,
    )
