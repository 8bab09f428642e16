"""The batched assignment gives the matches of the reference implementation, which works image by image."""

import pytest
import torch
from torch import Tensor

from flatout.yolo.loss import Search, assign_all, assign_ota, ota
from flatout.yolo.loss.matches import Anchors, Matches, pack_cells, unpack_cells
from tests.reference.ota_twin import twin_assign
from tests.yolo.comparing_matches import assert_same_matches, list_matches
from tests.yolo.detection_batch import DetectionBatch, awkward, make_batch

BATCHES = {
    "ordinary": lambda: make_batch([5, 9, 1, 7], seed=1),
    "empty images": lambda: make_batch([0, 6, 0, 0, 11, 0], seed=2),
    "one class": lambda: make_batch([4, 8, 3], num_classes=1, seed=3),
    "80 classes": lambda: make_batch([8, 3, 12], num_classes=80, seed=4),
    "four layers": lambda: make_batch([6, 10, 2], height=256, width=256, num_layers=4, seed=5),
    "wide": lambda: make_batch([7, 5, 9], height=128, width=224, seed=6),
    "tall": lambda: make_batch([7, 5, 9], height=192, width=96, seed=7),
    "one crowd": lambda: make_batch([2, 3, 120, 1, 4], height=160, width=160, seed=8),
    "many small": lambda: make_batch([seed % 4 for seed in range(40)], height=64, width=64, seed=9),
}
SEARCHES = {"lead": Search(), "aux lead": Search(4.0, 0.5, 20), "aux": Search(4.0, 1.0, 20), "strict": Search(2.5)}


def rows(matches: Matches, num_layers: int = 3) -> list[list[list[int]]]:
    return [list_matches(matches, layer).tolist() for layer in range(num_layers)]


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
def test_ota_gives_the_matches_of_the_reference(make, search: Search):
    batch = make()
    assert_same_matches(assign_ota(batch.maps, batch.targets, batch.anchors, search), batch, search)
    edge_cases = batch._replace(targets=awkward(batch.targets, seed=len(batch.targets)))
    found = assign_ota(edge_cases.maps, edge_cases.targets, edge_cases.anchors, search)
    assert_same_matches(found, edge_cases, search)


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
def test_the_candidates_are_those_of_the_reference(make):
    batch = make()
    batch = batch._replace(targets=awkward(batch.targets, seed=3))
    twin = twin_assign(*batch[:2], *batch.anchors, ota=False)
    for layer, expected in enumerate(twin.lists):
        assert torch.equal(list_matches(assign_all(*batch, Search()), layer), expected)


def test_a_crowd_processed_in_chunks_gives_the_same_matches(monkeypatch: pytest.MonkeyPatch):
    batch = make_batch([3, 90, 40, 0, 7, 60], height=160, width=160, seed=11)
    whole = assign_ota(*batch, Search())
    for pairs in (1, 1000, 20_000):
        monkeypatch.setattr(ota, "PAIRS_AT_ONCE", pairs)
        chunked = assign_ota(*batch, Search())
        assert rows(chunked) == rows(whole)
        assert chunked.num_taken_T is not None and whole.num_taken_T is not None
        assert torch.equal(chunked.num_taken_T, whole.num_taken_T)


def test_images_grouped_by_size_or_not_give_the_same_matches(monkeypatch: pytest.MonkeyPatch):
    batch = make_batch([3, 90, 1, 0, 7, 17, 33], height=160, width=160, seed=12)
    together = assign_ota(*batch, Search())
    monkeypatch.setattr(ota, "FEW_PAIRS", 0)
    assert rows(assign_ota(*batch, Search())) == rows(together)


def test_a_crowd_beside_small_images_does_not_pad_them():
    """384 images, one of them crowded: rows and columns are padded to at most twice their number."""
    batch = make_batch([4] * 383 + [300], height=64, width=64, seed=13)
    candidates = assign_all(*batch, Search())
    image_T = batch.targets[:, 0].int()
    by_image_M = torch.argsort(candidates.image_M, stable=True)
    groups = list(ota._groups(image_T, candidates.image_M, by_image_M, num_images=384))
    processed = sum(group.row_IR.numel() * group.column_IC.shape[1] for group in groups)
    needed = (torch.bincount(image_T) * torch.bincount(candidates.image_M)).sum()
    assert processed < 4 * needed
    assert len(groups) < 12


def test_the_number_of_operations_does_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch):
    def count(boxes: list[int]) -> int:
        batch = make_batch(boxes, height=64, width=64, seed=14)
        with torch.profiler.profile() as profile:
            assign_ota(*batch, Search())
        return sum(event.count for event in profile.key_averages())

    assert count([8] * 64) <= 1.05 * count([8] * 4)


def test_order_of_rows_and_padding_do_not_matter():
    batch = make_batch([6, 0, 9, 4], num_classes=5, seed=15)
    shuffle = torch.randperm(len(batch.targets), generator=torch.Generator().manual_seed(1))
    padding = torch.tensor([[-1.0, 0, 0.5, 0.5, 0.2, 0.2], [9.0, 1, 0.5, 0.5, 0.2, 0.2]])
    mixed = torch.cat((padding, batch.targets[shuffle], padding))
    expected = rows(assign_ota(*batch, Search()))
    found = rows(assign_ota(batch.maps, mixed, batch.anchors, Search()))
    back = {position + len(padding): int(old) for position, old in enumerate(shuffle)}
    for layer, entries in enumerate(found):
        named = [[*cell, back[target]] for *cell, target in entries]
        assert sorted(named) == sorted(expected[layer])


def test_no_target_gives_no_match():
    maps, targets, anchors = make_batch([3, 2], seed=16)
    for some in (targets[:0], targets.clone().index_fill_(1, torch.tensor([0]), -1.0)):
        for assign in (assign_all, assign_ota):
            assert rows(assign(maps, some, anchors, Search())) == [[], [], []]


def duplicate_case() -> DetectionBatch:
    """Two identical targets on constant maps: every decision is a tie."""
    maps = [torch.zeros(1, 3, side, side, 6) for side in (8, 4, 2)]
    target = torch.tensor([[0, 0, 0.55, 0.55, 0.3, 0.3]])
    size_LA2 = torch.full((3, 3, 2), 2.0)
    return DetectionBatch(maps, target.repeat(2, 1), Anchors(size_LA2, (8.0, 16.0, 32.0)))


def test_equal_costs_go_to_the_lower_column_and_the_lower_row():
    batch = duplicate_case()
    found = assign_ota(*batch, Search())
    twin = twin_assign(*batch[:2], *batch.anchors)
    assert rows(found) == [each.tolist() for each in twin.lists]
    taken = torch.cat([list_matches(found, layer) for layer in range(3)])
    assert len(taken) > 0
    assert (taken[:, 4] == 0).all()


def test_a_cost_that_is_not_finite_is_never_preferred():
    batch = make_batch([6, 6], num_classes=4, seed=17)
    for one_map in batch.maps:
        one_map[:, 0, ..., 4:] = 60.0  # every class is certain: y is 1 and the cost infinite
    listed = torch.cat([list_matches(assign_ota(*batch, Search()), layer) for layer in range(3)])
    everything = torch.cat([list_matches(assign_all(*batch, Search()), layer) for layer in range(3)])
    assert (everything[:, 1] == 0).any()
    lonely = {target for target in range(12) if (everything[everything[:, 4] == target, 1] == 0).all()}
    assert {int(target) for target in listed[listed[:, 1] == 0, 4]} <= lonely


def test_half_precision_maps_are_compared_in_float32():
    batch = make_batch([9, 4], num_classes=20, seed=18)
    half = [one_map.half() for one_map in batch.maps]
    exact = [one_map.float() for one_map in half]
    with torch.autocast("cpu", torch.bfloat16):
        found = assign_ota(half, *batch[1:], Search())
    assert rows(found) == rows(assign_ota(exact, *batch[1:], Search()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda maps: maps[:2], "do not fit 3 layers of 3 anchors"),
        (lambda maps: [each[:, :2] for each in maps], "Pass one map .* per layer"),
        (
            lambda maps: [each[:, :, :, :1].expand(-1, -1, -1, 5000, -1) for each in maps],
            "too large: at most 4096 cells",
        ),
    ],
)
def test_maps_that_do_not_belong_to_the_anchors_are_refused(change, message: str):
    maps, targets, anchors = make_batch([1], seed=19)
    with pytest.raises(ValueError, match=message):
        assign_all(change(maps), targets, anchors, Search())


def test_a_cell_survives_packing():
    numbers: list[Tensor] = [
        torch.tensor([0, 7, 3]),
        torch.tensor([0, 7, 2]),
        torch.tensor([0, 4095, 17]),
        torch.tensor([0, 4095, 99]),
    ]
    packed = pack_cells(*numbers)
    assert (packed >= 0).all()
    for found, expected in zip(unpack_cells(packed), numbers, strict=True):
        assert torch.equal(found, expected)
