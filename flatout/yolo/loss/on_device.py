"""The loss of one head by GPU kernels, forward and backward: no wait, and no copy of a map.

Forward reads each map's objectness once, keeps it, and reads the matched cells once; backward writes the gradient in
one pass, and the matched cells over it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.kernels import start
from flatout.yolo.loss import kernels_loss
from flatout.yolo.loss.assign_on_device import (
    PROGRAMS,
    classes_at_once,
    four_maps,
    outputs_of,
    plain_float,
    power_of_two,
)
from flatout.yolo.loss.config import LossConfig
from flatout.yolo.loss.kernel_support import layer_table
from flatout.yolo.loss.matches import Anchors, Matches, Spans
from flatout.yolo.loss.terms import LossParts
from flatout.yolo.multihead.head_config import OBJECTNESS
from flatout.yolo.multihead.joined_maps import Heads, num_classes

GRADIENT_BLOCK = 4096
"""Numbers of the gradient that a program writes."""


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
    """`head_loss` for matches kept in slots by the kernels of assign/on_device.py; `heads` where maps are joined."""
    assert matches.spans is not None
    dense = [each if _is_dense(each) else each.contiguous() for each in maps]
    num_anchors = anchors.size_LA2.shape[1]
    head = _Head(
        dense,
        layer_table(dense, outputs_of(heads)),
        balance_L if heads is None else heads.table_HF,
        plain_float(targets_T6),
        *matches[:3],
        plain_float(anchors.size_LA2),
        balance_L,
    )
    sizes = _Sizes(
        LAYERS=len(dense),
        ANCHORS=num_anchors,
        HEADS=0 if heads is None else heads.num,
        CLASSES=num_classes(dense, heads),
    )
    return LossParts(*_HeadLoss.apply(config, weight, matches.spans, sizes, *_flatten(head)))


def _is_dense(one_map: Tensor) -> bool:
    """Whether the map fills its memory without gaps, in any order of axes: its gradient then has the same strides."""
    filled = 1
    for stride, size in sorted(zip(one_map.stride(), one_map.shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


class _Head(NamedTuple):
    """Everything a kernel of the loss may want to know."""

    maps: list[Tensor]
    table: Tensor
    heads_HF: Tensor
    """Of joined maps (assign/heads.py); else anything."""
    targets_T6: Tensor
    place_M: Tensor
    image_M: Tensor
    target_M: Tensor
    anchors_LA2: Tensor
    balance_L: Tensor


class _Sizes(NamedTuple):
    """Constants of the kernels, by the names they have there."""

    LAYERS: int
    ANCHORS: int
    HEADS: int
    """Of joined maps; 0 for the maps of a single head."""
    CLASSES: int

    @property
    def num_heads(self) -> int:
        return max(self.HEADS, 1)

    @property
    def groups(self) -> int:
        """Of channels at a pixel: one per anchor, or a single one in joined maps."""
        return 1 if self.HEADS else self.ANCHORS

    def objectness(self, maps: list[Tensor]) -> dict[str, int]:
        """Where objectness is in a group of channels, as constants of the kernels."""
        if self.HEADS:
            channels, places = maps[0].shape[1], self.HEADS * self.ANCHORS
            return {"FIRST": channels - places, "PLACES": places, "CHANNELS": channels}
        return {"FIRST": OBJECTNESS, "PLACES": 1, "CHANNELS": maps[0].shape[4]}

    @property
    def sums_width(self) -> int:
        """Sums that a program leaves."""
        return kernels_loss.SUMS * power_of_two(self.LAYERS * self.num_heads)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, config: LossConfig, weight: float, spans: Spans, sizes: _Sizes, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = _unflatten(tensors)
        link_M = torch.empty_like(head.place_M)
        empty_sums, logits_S = _sum_empty(head, sizes, config)
        match_sums = _sum_matches(head, sizes, config, spans, link_M)
        total, items, obj_L, count_G = _add_up(head, sizes, config, weight, empty_sums, match_sums)
        ctx.save_for_backward(link_M, count_G, logits_S, *tensors)
        ctx.config, ctx.weight, ctx.sizes = config, weight, sizes
        ctx.mark_non_differentiable(items, obj_L)
        ctx.set_materialize_grads(False)
        return total, items, obj_L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        link_M, count_G, logits_S, *tensors = ctx.saved_tensors
        head = _unflatten(tensors)
        grads = [torch.empty_like(each) for each in head.maps]
        _write_empty(head, ctx.sizes, ctx.config, ctx.weight, grads, upstream, logits_S)
        _write_matches(head, ctx.sizes, ctx.config, ctx.weight, grads, upstream, link_M, count_G)
        return (None, None, None, None, *[None] * (len(tensors) - len(grads)), *grads)


def _flatten(head: _Head) -> list[Tensor]:
    """The tensors alone, the maps last: autograd wants to see each."""
    return [*head[1:], *head.maps]


def _unflatten(tensors: Sequence[Tensor]) -> _Head:
    others = len(_Head._fields) - 1
    return _Head(list(tensors[others:]), *tensors[:others])


def _sum_empty(head: _Head, sizes: _Sizes, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Objectness loss of all cells as if they were empty: partial sums [programs, L]; and the logits of all cells [S],
    in the order of memory."""
    sums = head.balance_L.new_empty(PROGRAMS * len(head.maps))
    where = sizes.objectness(head.maps)
    num_groups = sum(each.numel() for each in head.maps) // where["CHANNELS"]
    logits_S = head.maps[0].new_empty(num_groups * where["PLACES"])
    start(
        kernels_loss.empty_objectness,
        PROGRAMS,
        *four_maps(head.maps),
        head.table,
        head.heads_HF,
        logits_S,
        sums,
        head.maps[0].shape[0],
        config.obj_pw,
        config.fl_gamma,
        **sizes._asdict(),
        **where,
        BLOCK=512,
        FOCAL=config.fl_gamma > 0,
    )
    return sums, logits_S


def _sum_matches(head: _Head, sizes: _Sizes, config: LossConfig, spans: Spans, link_M: Tensor) -> Tensor | None:
    """Terms of the matches: partial sums [programs, heads x layers x kinds of sum]; none without targets. Fills
    link_M."""
    if not len(link_M):
        return None
    width = sizes.sums_width
    sums = head.balance_L.new_empty(PROGRAMS * width)
    start(
        kernels_loss.match_terms,
        PROGRAMS,
        *four_maps(head.maps),
        head.table,
        head.heads_HF,
        head.anchors_LA2,
        head.targets_T6,
        head.place_M,
        head.image_M,
        head.target_M,
        spans.first_row_B,
        spans.first_slot_BL,
        link_M,
        sums,
        len(link_M),
        config.gr,
        config.label_smoothing,
        config.cls_pw,
        config.obj_pw,
        config.fl_gamma,
        **sizes._asdict(),
        SLOTS=spans.slots_per_target,
        AT_ONCE=classes_at_once(sizes.CLASSES),
        COLUMNS=8,
        OTHERS=64,
        WIDTH=width,
        FOCAL=config.fl_gamma > 0,
        num_warps=2,
    )
    return sums


def _add_up(
    head: _Head, sizes: _Sizes, config: LossConfig, weight: float, empty_sums: Tensor, match_sums: Tensor | None
) -> tuple[Tensor, ...]:
    """Total, items, objectness of the layers, and the number of matches of each, of several heads one by one."""
    shapes = ((), (4,), (sizes.LAYERS,), (sizes.LAYERS * sizes.num_heads,))
    results = tuple(head.balance_L.new_empty(shape) for shape in shapes)
    start(
        kernels_loss.sum_up,
        1,
        head.table,
        head.heads_HF,
        head.balance_L,
        empty_sums if match_sums is None else match_sums,
        empty_sums,
        *results,
        head.maps[0].shape[0],
        config.box * weight,
        config.obj * weight,
        config.cls * weight,
        **sizes._asdict(),
        WIDTH=sizes.sums_width,
        PROGRAMS=PROGRAMS,
        AT_ONCE=min(PROGRAMS, 8192 // sizes.sums_width),
        MATCHES=match_sums is not None,
        num_warps=8,
    )
    return results


def _write_empty(
    head: _Head,
    sizes: _Sizes,
    config: LossConfig,
    weight: float,
    grads: list[Tensor],
    upstream: Tensor,
    logits_S: Tensor,
) -> None:
    """The whole gradient as if all cells were empty."""
    where = sizes.objectness(head.maps)
    start(
        kernels_loss.empty_gradient,
        sum(-(-each.numel() // GRADIENT_BLOCK) for each in grads),
        *four_maps(grads),
        head.table,
        head.heads_HF,
        logits_S,
        head.balance_L,
        upstream,
        head.maps[0].shape[0],
        config.obj * weight,
        config.obj_pw,
        config.fl_gamma,
        **sizes._asdict(),
        **where,
        GROUPS=sizes.groups,
        BLOCK=GRADIENT_BLOCK,
        LANES=power_of_two(GRADIENT_BLOCK * where["PLACES"] // where["CHANNELS"] + 1),
        FOCAL=config.fl_gamma > 0,
    )


def _write_matches(
    head: _Head,
    sizes: _Sizes,
    config: LossConfig,
    weight: float,
    grads: list[Tensor],
    upstream: Tensor,
    link_M: Tensor,
    count_G: Tensor,
) -> None:
    """The rows of the matched cells, over what `_write_empty` wrote."""
    if not len(link_M):
        return
    start(
        kernels_loss.match_gradient,
        PROGRAMS,
        *four_maps(head.maps),
        *four_maps(grads),
        head.table,
        head.heads_HF,
        head.anchors_LA2,
        head.targets_T6,
        head.place_M,
        head.image_M,
        head.target_M,
        link_M,
        head.balance_L,
        count_G,
        upstream,
        len(link_M),
        head.maps[0].shape[0],
        config.box * weight,
        config.obj * weight,
        config.cls * weight,
        config.gr,
        config.label_smoothing,
        config.cls_pw,
        config.obj_pw,
        config.fl_gamma,
        **sizes._asdict(),
        AT_ONCE=classes_at_once(sizes.CLASSES),
        COLUMNS=8,
        FOCAL=config.fl_gamma > 0,
        num_warps=2,
    )
