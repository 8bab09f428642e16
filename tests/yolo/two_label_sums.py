"""The same sums per label by torch operations and by the GPU kernels (label_audit/kernels.py).

Run as a program, it compares them in Triton's interpreter:

TRITON_INTERPRET=1 python -m tests.yolo.two_label_sums
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout import kernels
from flatout.yolo.label_audit.in_step import LabelSums
from flatout.yolo.label_audit.statistics import unpack_confusion
from flatout.yolo.loss import (
    Anchors,
    LossConfig,
    LossParts,
    aux_ota_loss,
    ota_loss,
    ota_router_loss,
    plain_loss,
    plain_router_loss,
)
from flatout.yolo.loss.losses import Assigned
from flatout.yolo.loss.matches import Matches, unpack_cells
from flatout.yolo.multihead.head_config import HeadConfig
from flatout.yolo.multihead.joined_maps import heads_on
from tests.yolo.detection_batch import make_batch
from tests.yolo.head_batches import make_groups, make_head_batch

CONFIG = LossConfig(label_smoothing=0.1, cls_pw=1.2, obj_pw=1.1, gr=0.9)
FOCAL = LossConfig(fl_gamma=1.5)
BOXES = (3, 0, 5, 1)
NUM_LABELS, NUM_PADDING = 6, 3
BAD = {2: 0, 4: 4, 7: 6}
"""Targets whose cells are not finite, and in which channel: box, objectness, a class."""

Loss = Callable[..., LossParts]


class Step(NamedTuple):
    """What a training step hands to the sums."""

    maps: list[Tensor]
    assigned: Assigned
    label_T1: Tensor
    anchors: Anchors
    config: LossConfig


def aux_loss(maps: list[Tensor], *rest: Any) -> LossParts:
    return aux_ota_loss(maps, maps, *rest)


def make_step(
    loss: Loss,
    *,
    config: LossConfig = CONFIG,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    groups: HeadConfig | None = None,
    **batch: Any,
) -> Step:
    """A random step with padding, labels that are shown twice, and targets without a label."""
    maps, targets_T6, anchors = (
        make_batch(BOXES, seed=12, **batch) if groups is None else make_head_batch(BOXES, groups, seed=12)
    )
    maps = [each.to(dtype) for each in maps]
    if strided:  # as a network with channels_last returns them
        maps = [each.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4) for each in maps]
    targets_T6 = torch.cat((targets_T6, torch.full((NUM_PADDING, 6), -1.0)))
    label_T1 = torch.tensor([2, -1, 0, 2, 4, 5, -1, 1, 3, *[-1] * NUM_PADDING], dtype=torch.int32)[:, None]
    parts = loss(maps, targets_T6, anchors, config, *([] if groups is None else [groups]))
    assert parts.assigned is not None
    return Step(maps, parts.assigned, label_T1, anchors, config)


def with_garbage(step: Step) -> Step:
    """The step with empty slots between the matches, which hold anything."""
    matches = step.assigned.matches
    num = 3 * len(matches.target_M) + 5
    slot_M = torch.randperm(num, generator=torch.Generator().manual_seed(1))[: len(matches.target_M)]
    packed_M, image_M = torch.randint(-(2**31), 2**31 - 1, (2, num), dtype=torch.int32)
    target_M = torch.full((num,), -1, dtype=torch.int32)
    packed_M[slot_M], image_M[slot_M], target_M[slot_M] = (each.to(torch.int32) for each in matches[:3])
    matches = Matches(packed_M, image_M, target_M)
    return step._replace(assigned=step.assigned._replace(matches=matches))


GROUPS = make_groups([(0, 2), (1, 3, 4), (5,)])
STEPS: dict[str, Callable[[], Step]] = {
    "plain": lambda: make_step(plain_loss),
    "ota": lambda: make_step(ota_loss, strided=True),
    "auxiliary": lambda: make_step(aux_loss),
    "four layers": lambda: make_step(ota_loss, num_layers=4),
    "focal": lambda: make_step(plain_loss, config=FOCAL),
    "one class": lambda: make_step(plain_loss, num_classes=1),
    "80 classes": lambda: make_step(ota_loss, num_classes=80, dtype=torch.bfloat16, strided=True),
    "200 classes": lambda: make_step(ota_loss, num_classes=200),
    "2100 classes": lambda: make_step(plain_loss, num_classes=2100, dtype=torch.float16),
    "heads, plain": lambda: make_step(plain_router_loss, groups=GROUPS),
    "heads, ota": lambda: make_step(ota_router_loss, groups=GROUPS, dtype=torch.bfloat16),
}


def with_bad_cells(step: Step) -> Step:
    """The step with cells of some targets that are not finite, as after an overflow."""
    maps = [each.clone() for each in step.maps]
    for m, target in enumerate(step.assigned.matches.target_M.tolist()):
        if target in BAD:
            layer, *place = (int(each[m]) for each in unpack_cells(step.assigned.matches.packed_M))
            maps[layer][int(step.assigned.matches.image_M[m]), *place, BAD[target]] = float("nan")
    return step._replace(maps=maps)


def without_bad_targets(step: Step) -> Step:
    """The step in which these targets belong to no label."""
    label_T1 = step.label_T1.clone()
    label_T1[list(BAD)] = -1
    return step._replace(label_T1=label_T1)


def on_gpu(step: Step) -> Step:
    target_T6, matches, heads = step.assigned
    heads = None if heads is None else heads_on(heads.groups, torch.device("cuda", 0))
    assigned = Assigned(
        target_T6.cuda(), Matches(matches.packed_M.cuda(), matches.image_M.cuda(), matches.target_M.cuda()), heads
    )
    anchors = Anchors(step.anchors.size_LA2.cuda(), step.anchors.strides_px)
    return Step([each.cuda() for each in step.maps], assigned, step.label_T1.cuda(), anchors, step.config)


def sums_of(step: Step) -> LabelSums:
    sums = LabelSums(NUM_LABELS, step.anchors, step.config, step.maps[0].device)
    sums.add(step.maps, step.assigned, step.label_T1)
    return sums


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], is_compared: bool) -> None:
    """Sums that differ by rounding at most; `is_compared`: the classes with which targets are confused are, too."""
    torch.testing.assert_close(found["sum"], expected["sum"], rtol=1e-4, atol=1e-5)
    (score_T, class_T), (true_score_T, true_class_T) = (
        unpack_confusion(each["confused"].numpy()) for each in (found, expected)
    )
    assert class_T.tolist() == true_class_T.tolist()
    assert abs(score_T - true_score_T).max() < 1e-5
    # Something was there to be compared: every label is seen, some are confirmed, some are confused.
    seen_T, own_T = expected["sum"][:, :2].unbind(1)
    assert bool((seen_T > 0).all()) and seen_T[2] == 2 and own_T.sum() > 0
    assert bool(expected["confused"].any()) == is_compared


def is_compared(name: str) -> bool:
    """Whether the classes with which targets of these steps are confused are recorded."""
    return name not in ("one class", "2100 classes") and not name.startswith("heads")


def main() -> None:
    def launch(kernel: Any, key: object, grid: tuple[int, int, int], *args: Any, num_warps: int) -> None:
        kernel[grid](*args)

    kernels.launch = launch  # type: ignore[assignment]  # the interpreter compiles nothing
    from flatout.yolo.label_audit.kernels import add_on_device

    for name, make in STEPS.items():
        step = with_garbage(make())
        expected = sums_of(step).read()
        # They are added to what is there.
        total_TK, confused_T = torch.full((NUM_LABELS + 1, 6), 2.0), torch.zeros(NUM_LABELS + 1, dtype=torch.int32)
        add_on_device(total_TK, confused_T, step.maps, step.assigned, step.label_T1, step.anchors, step.config)
        try:
            assert_same({"sum": total_TK[:-1] - 2, "confused": confused_T[:-1]}, expected, is_compared(name))
        except AssertionError as error:
            raise AssertionError(name) from error

    bad, expected = with_bad_cells(STEPS["ota"]()), sums_of(without_bad_targets(STEPS["ota"]())).read()
    total_TK, confused_T = torch.zeros(NUM_LABELS + 1, 6), torch.zeros(NUM_LABELS + 1, dtype=torch.int32)
    add_on_device(total_TK, confused_T, bad.maps, bad.assigned, bad.label_T1, bad.anchors, bad.config)
    torch.testing.assert_close(total_TK[:-1], expected["sum"], rtol=1e-4, atol=1e-5)
    assert torch.equal(confused_T[:-1] > 0, expected["confused"] > 0)


if __name__ == "__main__":
    main()
