"""The loss router computes all heads at once, with the same results as head by head."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.yolo.loss import LossConfig, ota_router_loss, plain_loss, plain_router_loss
from flatout.yolo.multihead.head_config import HeadConfig, HeadGroup
from flatout.yolo.multihead.joined_maps import heads_on, route
from tests.reference.router_twin import twin_router_loss
from tests.yolo.detection_batch import awkward
from tests.yolo.head_batches import HeadBatch, by_head, make_groups, make_head_batch

PLAIN = LossConfig()
OPTIONS = LossConfig(fl_gamma=1.5, label_smoothing=0.1, obj_pw=1.3, cls_pw=0.7, gr=0.5, anchor_t=3.0)
GROUPS = {
    "even": make_groups([[0, 1], [2, 3]]),
    "uneven, unsorted, weighted": make_groups([[5, 0], [2], [1, 4, 3]], [1.0, 0.5, 2.0]),
    "full heads": make_groups([[5, 0], [2], [1, 4, 3]], [1.0, 0.5, 2.0], full_head=True),
    "one head": make_groups([[0, 1, 2]]),
    "a head per class": make_groups([[3], [1], [0], [2], [4]]),
}
LOSSES = {"plain": plain_router_loss, "ota": ota_router_loss}


@pytest.mark.parametrize("config", [PLAIN, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_all_heads_at_once_give_the_same_loss_as_one_by_one(groups: HeadConfig, loss: str, config: LossConfig):
    batch = make_head_batch([5, 9, 0, 7], groups, seed=1)
    assert_like_twin(batch._replace(targets=awkward(batch.targets, seed=5)), groups, loss, config)


@settings(max_examples=15, deadline=None)
@given(
    boxes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    owners=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    full_head=st.booleans(),
    loss=st.sampled_from(sorted(LOSSES)),
    seed=st.integers(0, 2**31),
)
def test_any_partition_of_the_classes_gives_the_loss_of_the_reference(boxes, owners, full_head, loss, seed):
    used = sorted(set(owners))
    classes_H = [[each for each, owner in enumerate(owners) if owner == head] for head in used]
    # In reverse order, because the position in the list is the number in the head.
    groups = make_groups([classes[::-1] for classes in classes_H], full_head=full_head)
    assert_like_twin(make_head_batch(boxes, groups, seed=seed), groups, loss, PLAIN)


def assert_like_twin(batch: HeadBatch, groups: HeadConfig, loss: str, config: LossConfig) -> None:
    batch = batch.with_gradient()
    parts = LOSSES[loss](*batch, config, groups)
    total, items = twin_router_loss(
        by_head(batch.maps, groups), batch.targets, batch.anchors, config, groups, ota=loss == "ota"
    )
    torch.testing.assert_close(parts.total, total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts.items, items, rtol=1e-5, atol=1e-7)
    found, expected = (torch.autograd.grad(each, batch.maps) for each in (parts.total, total))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_one_head_with_all_classes_is_the_ordinary_loss():
    groups = GROUPS["one head"]
    batch = make_head_batch([6, 2], groups, seed=3)
    ordinary = plain_loss(by_head(batch.maps, groups)[0], batch.targets, batch.anchors, PLAIN)
    torch.testing.assert_close(plain_router_loss(*batch, PLAIN, groups).items, ordinary.items)


def test_a_head_without_targets_still_has_an_objectness_loss():
    groups = make_groups([[0, 1], [2, 3]])
    batch = make_head_batch([4, 4], groups, seed=4)
    batch.targets[:, 1] = 0
    batch = batch.with_gradient()
    plain_router_loss(*batch, PLAIN, groups).total.backward()
    for empty in by_head([each.grad for each in batch.maps], groups)[1]:
        assert (empty[..., 4] > 0).all()
        assert (empty[..., [0, 1, 2, 3, 5, 6]] == 0).all()


def test_heads_are_summed_and_not_averaged():
    groups = make_groups([[0, 1], [2, 3]])
    batch = make_head_batch([4, 4], groups, seed=5)
    items = [plain_router_loss(*batch, PLAIN, _weighted(groups, weights)).items for weights in ((1, 0), (0, 1), (1, 1))]
    torch.testing.assert_close(items[0] + items[1], items[2])


def _weighted(groups: HeadConfig, weights: tuple[float, ...]) -> HeadConfig:
    pairs = zip(groups.heads, weights, strict=True)
    return replace(groups, heads=tuple(HeadGroup(group.classes, float(weight)) for group, weight in pairs))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_order_of_targets_and_padding_change_nothing(loss: str):
    groups = GROUPS["uneven, unsorted, weighted"]
    batch = make_head_batch([6, 3, 8], groups, seed=6)
    padding = torch.tensor([[-1.0, -1, 0, 0, 0, 0]]).expand(7, 6)
    padded = batch._replace(targets=torch.cat((batch.targets, padding)))
    torch.testing.assert_close(LOSSES[loss](*padded, PLAIN, groups).items, LOSSES[loss](*batch, PLAIN, groups).items)


def test_targets_go_to_their_own_head_with_their_local_id():
    heads = heads_on(GROUPS["uneven, unsorted, weighted"], torch.device("cpu"))
    targets = torch.tensor([[0.0, 5, 0.5, 0.5, 0.1, 0.1], [2, 0, 0, 0, 0, 0], [1, 4, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0]])
    routed = route(targets, heads)
    assert routed[:, :2].tolist() == [[0, 0], [6, 1], [5, 1], [-1, 1]]
    assert torch.equal(routed[:, 2:], targets[:, 2:])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_maps_in_any_memory_order_get_half_precision_gradients(loss: str, dtype: torch.dtype):
    groups = GROUPS["uneven, unsorted, weighted"]
    batch = make_head_batch([6, 4], groups, seed=7)
    half = batch._replace(maps=[each.to(dtype, memory_format=torch.channels_last) for each in batch.maps])
    half = half.with_gradient()
    exact = half._replace(maps=[each.detach().float() for each in half.maps]).with_gradient()
    found, expected = (LOSSES[loss](*each, PLAIN, groups) for each in (half, exact))
    torch.testing.assert_close(found.items, expected.items)
    for mine, theirs in zip(
        torch.autograd.grad(found.total, half.maps), torch.autograd.grad(expected.total, exact.maps), strict=True
    ):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max()))
