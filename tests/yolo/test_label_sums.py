"""What steps see of each label (label_audit/in_step.py): against a plain twin, padding, graphs, and over epochs."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flatout import kernels
from flatout.yolo.label_audit import in_step
from flatout.yolo.label_audit.in_step import LabelSums, TargetTerms, pack_confusion, target_terms
from flatout.yolo.label_audit.statistics import LabelStatistics, unpack_confusion
from flatout.yolo.loss import LossConfig, LossParts, aux_ota_loss, ota_loss, ota_router_loss, plain_loss
from flatout.yolo.loss.losses import Assigned
from flatout.yolo.loss.matches import Anchors, unpack_cells
from tests.feed.test_device import needs_gpu
from tests.triton_interpreter import check_in_interpreter, needs_triton
from tests.yolo.detection_batch import DetectionBatch, make_batch
from tests.yolo.head_batches import make_groups, make_head_batch
from tests.yolo.two_label_sums import (
    NUM_LABELS,
    STEPS,
    assert_same,
    is_compared,
    on_gpu,
    sums_of,
    with_bad_cells,
    with_garbage,
    without_bad_targets,
)

CONFIG = LossConfig(label_smoothing=0.1, cls_pw=1.2)
BOXES = (3, 0, 5, 1)
LOSSES: dict[str, Callable[[DetectionBatch], LossParts]] = {
    "plain": lambda batch: plain_loss(batch.maps, batch.targets, batch.anchors, CONFIG),
    "ota": lambda batch: ota_loss(batch.maps, batch.targets, batch.anchors, CONFIG),
    "aux": lambda batch: aux_ota_loss(batch.maps, batch.maps, batch.targets, batch.anchors, CONFIG),
}


def assigned_of(parts: LossParts) -> Assigned:
    assert parts.assigned is not None
    return parts.assigned


def twin(maps: list[torch.Tensor], assigned: Assigned, anchors: Anchors) -> list[dict[str, float]]:
    """The terms of every target, one match after the other."""
    cells = unpack_cells(assigned.matches.packed_M)
    found: list[list[dict[str, float]]] = [[] for _ in assigned.target_T6]
    for m, target in enumerate(assigned.matches.target_M.tolist()):
        if target < 0:
            continue
        layer, anchor, row, column = (int(each[m]) for each in cells)
        logits = maps[layer][int(assigned.matches.image_M[m]), anchor, row, column].double()
        _, rows, columns = maps[layer].shape[1:4]
        x, y, w, h = (2 * logits[:4].sigmoid()).tolist()
        w, h = w * w * float(anchors.size_LA2[layer, anchor, 0]), h * h * float(anchors.size_LA2[layer, anchor, 1])
        cx, cy, tw, th = (assigned.target_T6[target, 2:] * torch.tensor([columns, rows, columns, rows])).tolist()
        box = (column + x - 0.5, row + y - 0.5, w, h)
        common = overlap(box, (cx, cy, tw, th))
        iou = common / (w * h + tw * th - common)
        objectness, probability = float(logits[4].sigmoid()), logits[5:].sigmoid().tolist()
        own = int(assigned.target_T6[target, 1])
        others = [score for number, score in enumerate(probability) if number != own]
        found[target].append(
            {
                "own": objectness * probability[own] * min(1, max(0, (iou - 0.5) / 0.25)),
                "near": objectness * max(probability) * min(1, max(0, (iou - 0.1) / 0.2)),
                "other": objectness * max(others) * (iou >= 0.45),
                "iou": iou,
            }
        )
    return [
        {name: max((each[name] for each in own), default=0.0) for name in ("own", "near", "other", "iou")}
        | {"seen": float(bool(own))}
        for own in found
    ]


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    sides = [
        min(one[axis] + one[axis + 2] / 2, other[axis] + other[axis + 2] / 2)
        - max(one[axis] - one[axis + 2] / 2, other[axis] - other[axis + 2] / 2)
        for axis in (0, 1)
    ]
    return max(0.0, sides[0]) * max(0.0, sides[1])


@pytest.mark.parametrize("kind", LOSSES)
def test_the_terms_of_targets_are_those_of_a_plain_twin(kind):
    batch = make_batch(BOXES, seed=4)
    assigned = assigned_of(LOSSES[kind](batch))
    terms = target_terms(batch.maps, assigned, batch.anchors, CONFIG)
    for number, expected in enumerate(twin(batch.maps, assigned, batch.anchors)):
        for name, value in expected.items():
            assert getattr(terms, name)[number] == pytest.approx(value, abs=1e-5), (number, name)
    assert terms.seen.sum() > 0 and terms.other.max() > 0.02


@pytest.mark.parametrize("kind", ["plain", "ota"])
def test_the_losses_of_targets_make_up_the_loss_that_is_trained_with(kind):
    # With one layer, box and class loss are means over all matches, and a target's loss is the mean over its own.
    batch = make_batch(BOXES, seed=4)
    only_boxes = LossConfig(box=1, obj=0, cls=0.5, label_smoothing=0.1)
    single = DetectionBatch(
        batch.maps[1:2], batch.targets, Anchors(batch.anchors.size_LA2[1:2], batch.anchors.strides_px[1:2])
    )
    loss = {"plain": plain_loss, "ota": ota_loss}[kind]
    parts = loss(single.maps, single.targets, single.anchors, only_boxes)
    assigned = assigned_of(parts)
    terms = target_terms(single.maps, assigned, single.anchors, only_boxes)
    count_T = torch.bincount(
        assigned.matches.target_M[assigned.matches.target_M >= 0].long(), minlength=len(terms.loss)
    )
    expected = float((terms.loss * count_T).sum() / count_T.sum())
    assert float(parts.box + parts.cls) == pytest.approx(expected, rel=1e-5)


def test_several_heads_are_read_through_their_joined_maps():
    groups = make_groups([(0, 2), (1, 3, 4)])
    batch = make_head_batch(BOXES, groups, seed=2)
    assigned = assigned_of(ota_router_loss(batch.maps, batch.targets, batch.anchors, CONFIG, groups))
    terms = target_terms(batch.maps, assigned, batch.anchors, CONFIG)
    assert terms.seen.sum() > 5 and terms.iou.max() > 0.3 and bool((terms.loss[terms.seen > 0] > 0).all())
    assert not terms.confused.any()  # classes of heads are numbered on their own


def test_padding_and_empty_slots_change_nothing():
    batch = make_batch(BOXES, seed=5)
    padded = batch._replace(targets=torch.cat((batch.targets, torch.full((4, 6), -1.0))))
    terms, with_padding = (
        target_terms(each.maps, assigned_of(LOSSES["ota"](each)), each.anchors, CONFIG) for each in (batch, padded)
    )
    for one, other in zip(terms, with_padding, strict=True):
        assert torch.equal(one, other[: len(one)]) and not other[len(one) :].any()


def test_sums_are_per_label_and_leave_out_what_has_none():
    batch = make_batch((2, 2), seed=6)
    sums = LabelSums(3, batch.anchors, CONFIG, torch.device("cpu"))
    assigned = assigned_of(LOSSES["plain"](batch))
    terms = target_terms(batch.maps, assigned, batch.anchors, CONFIG)
    # Label 2 is shown twice, label 0 once, label 1 never; one target is a pasted object.
    label_T1 = torch.tensor([[2], [-1], [0], [2]], dtype=torch.int32)
    sums.add(batch.maps, assigned, label_T1)
    sums.add(batch.maps, assigned, label_T1)
    read = sums.read()
    expected = torch.stack([2 * terms.own[2], torch.tensor(0.0), 2 * (terms.own[0] + terms.own[3])])
    assert terms.seen.tolist() == [1, 1, 1, 1]
    assert read["sum"][:, 0].tolist() == [2, 0, 4]
    torch.testing.assert_close(read["sum"][:, 1], expected)
    again = LabelSums(3, batch.anchors, CONFIG, torch.device("cpu"))
    again.load(read)
    assert torch.equal(again.read()["sum"], read["sum"]) and torch.equal(again.read()["confused"], read["confused"])
    again.clear()
    assert not again.read()["sum"].any()


def test_targets_whose_loss_is_not_finite_are_left_out():
    step = STEPS["ota"]()
    found, expected = sums_of(with_bad_cells(step)).read(), sums_of(without_bad_targets(step)).read()
    assert torch.equal(found["sum"], expected["sum"]) and torch.equal(found["confused"], expected["confused"])
    assert expected["sum"][:, 0].sum() > 2 and not torch.equal(expected["sum"], sums_of(step).read()["sum"])


def test_the_most_confident_other_class_wins_whatever_its_number():
    packed = pack_confusion(torch.tensor([0.3, 0.9, 0.0]), torch.tensor([7, 2, 5]))
    assert packed.max() == packed[1] and packed[2] == 0
    score, number = unpack_confusion(packed.numpy())
    assert number.tolist() == [7, 2, -1] and score.tolist() == pytest.approx([0.3, 0.9, 0], abs=1e-5)


def test_epochs_count_how_often_a_label_was_learned_and_forgotten():
    statistics = LabelStatistics.empty(3, "labels")
    epochs = ((0.6, True), (0.1, True), (0.9, False), (0.7, True))
    for own, is_shown in epochs:
        # Label 0 changes, label 1 is learned in every epoch, label 2 is never shown.
        rows = [[2, 2 * own, 0, 0, 1.0, 4.0] if is_shown else [0] * 6, [1, 0.5, 0, 0, 0.5, 1.0], [0] * 6]
        statistics = statistics.add({"sum": np.array(rows, np.float32), "confused": np.array([5, 0, 0], np.int32)})
    assert statistics.num_epochs == 4 and statistics.epochs_T.tolist() == [3, 4, 0]
    assert statistics.learned_T.tolist() == [2, 4, 0] and statistics.forgotten_T.tolist() == [1, 0, 0]
    assert statistics.loss_T.tolist() == [6, 4, 0] and statistics.confused_T.tolist() == [5, 0, 0]
    # An epoch counts by the squared mean of what is confirmed in it.
    weights = [
        ((own + 0.5) / 2 if is_shown else 0.5) ** 2 for own, is_shown in ((0.6, 1), (0.1, 1), (0.9, 0), (0.7, 1))
    ]
    assert statistics.weight_T.tolist() == pytest.approx([weights[0] + weights[1] + weights[3], sum(weights), 0])


@needs_gpu
@pytest.mark.parametrize("kind", LOSSES)
def test_a_cuda_graph_sums_up_what_the_cpu_does(kind):
    batch = make_batch(BOXES, seed=4)
    label_T1 = torch.arange(len(batch.targets), dtype=torch.int32)[:, None]
    expected = LabelSums(len(label_T1), batch.anchors, CONFIG, torch.device("cpu"))
    expected.add(batch.maps, assigned_of(LOSSES[kind](batch)), label_T1)
    there = DetectionBatch(
        [each.cuda() for each in batch.maps],
        batch.targets.cuda(),
        Anchors(batch.anchors.size_LA2.cuda(), batch.anchors.strides_px),
    )
    label_T1 = label_T1.cuda()
    sums = LabelSums(len(label_T1), there.anchors, CONFIG, torch.device("cuda"))

    def step() -> None:
        sums.add(there.maps, assigned_of(LOSSES[kind](there)), label_T1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    sums.clear()
    graph.replay()
    torch.testing.assert_close(sums.read()["sum"], expected.read()["sum"], rtol=1e-3, atol=1e-4)


def test_deterministic_trainings_sum_up_by_torch_operations_even_with_a_gpu(monkeypatch):
    step = STEPS["plain"]()
    expected = sums_of(step).read()["sum"]
    monkeypatch.setattr(in_step, "can_use_kernels", lambda maps: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert torch.equal(sums_of(step).read()["sum"], expected)


@needs_triton
def test_the_kernels_sum_up_what_torch_does_in_the_interpreter():
    check_in_interpreter("tests.yolo.two_label_sums")


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("name", STEPS)
def test_the_kernels_sum_up_what_torch_does_on_the_same_gpu(name, monkeypatch):
    step = on_gpu(with_garbage(STEPS[name]()))
    found = sums_of(step)
    sums = LabelSums(NUM_LABELS, step.anchors, step.config, torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums.add(step.maps, step.assigned, step.label_T1)
    for _ in range(3):
        graph.replay()
    monkeypatch.setattr(in_step, "can_use_kernels", lambda maps: False)
    expected = sums_of(step).read()
    assert_same(found.read(), expected, is_compared(name))
    replayed = sums.read()
    assert_same({**replayed, "sum": replayed["sum"] / 3}, expected, is_compared(name))


@pytest.mark.gpu
@needs_gpu
@needs_triton
def test_batches_with_other_numbers_of_targets_compile_nothing_new():
    step = on_gpu(with_garbage(STEPS["ota"]()))
    sums_of(step)
    compiled = {id(program) for program in kernels._compiled.values()}
    for num in (1, 16, 4096):
        target_T6 = torch.cat((step.assigned.target_T6, step.assigned.target_T6.new_full((num, 6), -1.0)))
        label_T1 = torch.cat((step.label_T1, step.label_T1.new_full((num, 1), -1)))
        assigned = assigned_of(ota_loss(step.maps, target_T6, step.anchors, step.config))
        sums_of(step._replace(assigned=assigned, label_T1=label_T1))
    added = [program.name for program in kernels._compiled.values() if id(program) not in compiled]
    assert not {"score_matches", "add_targets"} & set(added)


def test_terms_have_a_name_for_every_column():
    from flatout.yolo.label_audit.statistics import COLUMNS

    assert TargetTerms._fields[: len(COLUMNS)] == COLUMNS
