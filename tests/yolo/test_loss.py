"""The losses give the numbers and gradients of the reference implementation, in float32 for maps of any dtype."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flatout.yolo.loss import (
    LossConfig,
    Matches,
    Search,
    assign_all,
    aux_ota_loss,
    head_loss,
    ota_loss,
    plain_loss,
    rebalance,
    sum_parts,
)
from flatout.yolo.loss.losses import default_balance
from flatout.yolo.loss.matches import pack_cells
from tests.reference.ota_twin import twin_assign, twin_loss
from tests.triton_interpreter import check_in_interpreter, needs_triton
from tests.yolo.comparing_matches import list_matches
from tests.yolo.detection_batch import DetectionBatch, awkward, make_batch

DOCS = Path(__file__).parents[2] / "docs"
PLAIN = LossConfig()
OPTIONS = LossConfig(fl_gamma=1.5, label_smoothing=0.1, obj_pw=1.3, cls_pw=0.7, gr=0.5, anchor_t=3.0)
BATCHES = {
    "ordinary": lambda: make_batch([5, 9, 1, 7], seed=1),
    "no targets": lambda: make_batch([0, 0], seed=2),
    "one class": lambda: make_batch([4, 0, 3], num_classes=1, seed=3),
    "80 classes": lambda: make_batch([8, 3], num_classes=80, seed=4),
    "four layers": lambda: make_batch([6, 2], height=192, width=192, num_layers=4, seed=5),
    "wide": lambda: make_batch([7, 5], height=96, width=160, seed=6),
}


def with_gradient(batch: DetectionBatch) -> DetectionBatch:
    return batch._replace(maps=[one_map.detach().clone().requires_grad_() for one_map in batch.maps])


def gradients(total: torch.Tensor, batch: DetectionBatch) -> list[torch.Tensor]:
    return list(torch.autograd.grad(total, batch.maps))


@pytest.mark.parametrize("config", [PLAIN, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("loss", [plain_loss, ota_loss])
@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
def test_loss_items_and_gradients_are_those_of_the_reference(make, loss, config: LossConfig):
    batch = with_gradient(make())
    batch = batch._replace(targets=awkward(batch.targets, seed=5))
    parts = loss(*batch, config)
    twin = twin_assign(*batch[:2], *batch.anchors, anchor_t=config.anchor_t, ota=loss is ota_loss)
    total, items = twin_loss(*batch[:2], twin.lists, batch.anchors.size_LA2, config)
    torch.testing.assert_close(parts.total, total, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(parts.items, items, rtol=1e-5, atol=1e-7)
    for found, expected in zip(gradients(parts.total, batch), gradients(total, batch), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_the_auxiliary_head_is_matched_by_the_predictions_of_the_lead():
    lead, aux = (with_gradient(make_batch([5, 9], height=192, width=192, num_layers=4, seed=seed)) for seed in (7, 8))
    parts = aux_ota_loss(lead.maps, aux.maps, lead.targets, lead.anchors, PLAIN)
    expected = 0
    for maps, reach, weight in ((lead.maps, 0.5, 1.0), (aux.maps, 1.0, 0.25)):
        twin = twin_assign(lead.maps, lead.targets, *lead.anchors, reach=reach, top=20)
        expected = expected + weight * twin_loss(maps, lead.targets, twin.lists, lead.anchors.size_LA2, PLAIN)[0]
    torch.testing.assert_close(parts.total, expected)


@pytest.mark.parametrize("loss", [plain_loss, ota_loss])
def test_only_matched_cells_and_objectness_receive_gradient(loss):
    batch = with_gradient(make_batch([6, 4], seed=9))
    for layer, gradient in enumerate(gradients(loss(*batch, PLAIN).total, batch)):
        assert (gradient[..., 4] != 0).all()
        matched = torch.zeros(gradient.shape[:4], dtype=torch.bool)
        listed = list_matches(assign_all(*batch, Search()), layer)
        matched[listed[:, :4].unbind(1)] = True
        assert (gradient[~matched][:, [0, 1, 2, 3, 5]] == 0).all()


@pytest.mark.parametrize("loss", [plain_loss, ota_loss])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_maps_are_computed_in_float32_and_get_half_precision_gradients(loss, dtype: torch.dtype):
    batch = make_batch([6, 4], num_classes=20, seed=10)
    half = with_gradient(batch._replace(maps=[one_map.to(dtype) for one_map in batch.maps]))
    exact = with_gradient(half._replace(maps=[one_map.float() for one_map in half.maps]))
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(*half, PLAIN)
    expected = loss(*exact, PLAIN)
    assert torch.equal(found.total, expected.total)
    for mine, theirs in zip(gradients(found.total, half), gradients(expected.total, exact), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max()))


def test_maps_in_another_memory_order_give_the_same_loss():
    batch = make_batch([6, 4], seed=11)
    permuted = [one_map.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4) for one_map in batch.maps]
    assert not permuted[0].is_contiguous()
    assert torch.equal(ota_loss(permuted, *batch[1:], PLAIN).total, ota_loss(*batch, PLAIN).total)


def test_the_last_of_several_matches_decides_the_objectness_of_a_cell():
    batch = with_gradient(make_batch([2], num_classes=1, seed=12))
    packed_M = pack_cells(*(torch.full((2,), number) for number in (0, 0, 3, 5)))
    losses = []
    for order in ([0, 1], [1, 0]):
        matches = Matches(packed_M, torch.zeros(2, dtype=torch.int32), torch.tensor(order, dtype=torch.int32))
        last = matches._replace(**{name: getattr(matches, name)[1:] for name in ("packed_M", "image_M", "target_M")})
        both, alone = (head_loss(batch.maps, batch.targets, each, batch.anchors, PLAIN) for each in (matches, last))
        assert torch.equal(both.obj, alone.obj)
        losses.append(both)
    torch.testing.assert_close(losses[0].box, losses[1].box)


def test_parts_have_names_and_add_up():
    batch = make_batch([3, 5], seed=13)
    parts = ota_loss(*batch, PLAIN)
    assert torch.equal(torch.stack((parts.box, parts.obj, parts.cls)), parts.items[:3])
    torch.testing.assert_close(parts.items[:3].sum(), parts.items[3])
    torch.testing.assert_close(parts.total, 2 * parts.items[3])
    assert not parts.items.requires_grad


def test_heads_are_weighted_and_summed():
    batch = make_batch([3, 5], seed=14)
    matches = assign_all(*batch, Search())
    one, half = (head_loss(batch.maps, batch.targets, matches, batch.anchors, PLAIN, weight=w) for w in (1.0, 0.5))
    together = sum_parts([one, half, half])
    torch.testing.assert_close(together.total, 2 * one.total)
    torch.testing.assert_close(together.items, 2 * one.items)
    assert torch.equal(together.obj_L, one.obj_L)


def test_a_head_for_some_of_the_classes_ignores_the_other_targets():
    batch = make_batch([6, 8], num_classes=4, seed=15)
    known = batch.targets[:, 1] >= 2
    local = batch.targets - torch.tensor([0.0, 2, 0, 0, 0, 0])
    padded = torch.where(known[:, None], local, torch.tensor([-1.0, 0, 0, 0, 0, 0]))
    maps = [one_map[..., :7] for one_map in batch.maps]
    torch.testing.assert_close(
        plain_loss(maps, padded, batch.anchors, PLAIN).items, plain_loss(maps, local[known], batch.anchors, PLAIN).items
    )


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "ota.md").read_text(), re.DOTALL)
    batch = with_gradient(make_batch([3, 5], num_classes=80, seed=16))
    strides_px = torch.tensor(batch.anchors.strides_px)
    anchors_px = batch.anchors.size_LA2 * strides_px[:, None, None]
    exec(code, {"maps": batch.maps, "targets": batch.targets, "anchors_px": anchors_px, "strides_px": strides_px})
    assert "tensor(" in capsys.readouterr().out
    assert all(one_map.grad is not None for one_map in batch.maps)


def test_gains_are_scaled_by_layers_classes_and_image_size():
    scaled = LossConfig(box=0.05, obj=0.7, cls=0.3).scaled(num_layers=4, num_classes=20, image_size_px=320)
    assert scaled.box == pytest.approx(0.05 * 0.75)
    assert scaled.obj == pytest.approx(0.7 * 0.25 * 0.75)
    assert scaled.cls == pytest.approx(0.3 * 0.25 * 0.75)


def test_the_balance_depends_on_the_number_of_layers():
    assert default_balance(3) == (4.0, 1.0, 0.4)
    assert default_balance(4) == (4.0, 1.0, 0.25, 0.06)
    assert default_balance(5) == (4.0, 1.0, 0.25, 0.06, 0.02)


def test_rebalancing_keeps_stride_16_at_one():
    balance_L = rebalance(torch.tensor([4.0, 1.0, 0.4]), torch.tensor([0.01, 0.02, 0.03]), (8.0, 16.0, 32.0))
    assert balance_L[1] == 1
    assert balance_L[0] < 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": -1.0}, r"loss\.box=-1\.0 must not be negative"),
        ({"cls_pw": float("nan")}, r"loss\.cls_pw=nan must not be negative"),
        ({"anchor_t": 1.0}, r"loss\.anchor_t=1\.0 matches no target"),
        ({"label_smoothing": 2.0}, r"loss\.label_smoothing=2\.0 must be from 0 to 1"),
        ({"gr": -0.1}, r"loss\.gr=-0\.1 must be from 0 to 1"),
    ],
)
def test_an_invalid_config_is_refused(change: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **change)


@needs_triton
def test_the_kernels_compute_the_loss_in_the_interpreter():
    check_in_interpreter("tests.yolo.interpreted_loss")
