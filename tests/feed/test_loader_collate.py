"""Custom collate functions: alone, they get whole batches in one worker; with a join_fn, all workers share a batch."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from flatout.feed.loader import Loader, cat_rows, join_rows
from tests.feed.loader_datasets import (
    Bag,
    Batched,
    Growing,
    Kinds,
    Nested,
    Numbers,
    as_pairs,
    assert_same_epochs,
    detection_collate,
    detection_join,
    equal,
    only_even,
    pad,
)


@pytest.mark.parametrize("collate_fn", [as_pairs, list, only_even, detection_collate, lambda samples: len(samples)])
def test_a_collate_fn_alone_gets_whole_batches(collate_fn):
    assert_same_epochs(Numbers(), batch_size=6, collate_fn=collate_fn, epochs=2)


def test_a_collate_fn_that_pads_may_make_batches_of_any_size():
    assert_same_epochs(Growing(), batch_size=4, collate_fn=pad, epochs=3)


def test_a_batch_larger_than_expected_is_pickled_with_a_warning_and_fits_later(caplog):
    def blow_up(samples):
        return torch.ones(1000 * samples[0][1] + 1)

    loader = Loader(Numbers(60), 4, num_workers=1, collate_fn=blow_up)
    with caplog.at_level(logging.WARNING):
        sizes = [[len(batch) for batch in loader] for _ in range(2)]
    assert sizes[0] == sizes[1] == [4000 * step + 1 for step in range(15)]
    assert caplog.text.count("the result of collate_fn is sent by pickle: batches are larger") == 1


def test_a_custom_batch_type_arrives_complete():
    bags = list(Loader(Numbers(), 6, num_workers=2, collate_fn=Bag))
    theirs = list(DataLoader(Numbers(), 6, collate_fn=Bag))
    assert all(type(bag) is Bag and bag.labels == other.labels for bag, other in zip(bags, theirs, strict=True))
    assert all(torch.equal(bag.images, other.images) for bag, other in zip(bags, theirs, strict=True))
    assert all(bag.again is bag.images for bag in bags)


def test_the_result_of_a_collate_fn_alone_is_safe_to_keep():
    kept = list(Loader(Numbers(100), 4, num_workers=2, collate_fn=as_pairs))
    assert equal(kept, list(DataLoader(Numbers(100), 4, collate_fn=as_pairs)))


def test_a_collate_fn_without_batching_gets_single_samples():
    assert_same_epochs(Numbers(), batch_size=None, collate_fn=lambda sample: sample[1] + 1)


def test_a_collate_fn_gets_what_getitems_returns():
    assert_same_epochs(Batched(), batch_size=6, collate_fn=as_pairs)


def test_a_batch_in_channels_last_arrives_in_channels_last():
    def collate(samples):
        images = torch.stack([x for x, _ in samples])[:, None].repeat(1, 3, 1, 1)
        return images.contiguous(memory_format=torch.channels_last)

    assert_same_epochs(Numbers(), batch_size=6, collate_fn=collate)
    batch = next(iter(Loader(Numbers(), 6, num_workers=1, collate_fn=collate)))
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_a_tensor_with_gaps_arrives_with_its_values():
    assert_same_epochs(Numbers(), batch_size=6, collate_fn=lambda s: torch.stack([x for x, _ in s])[:, :, ::2])


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("micro_batch", ["auto", 1, 4])
def test_a_consistent_join_fn_gives_the_same_batches_as_collate_fn_alone(workers, micro_batch):
    assert_same_epochs(
        Numbers(),
        batch_size=6,
        collate_fn=detection_collate,
        num_workers=workers,
        ours={"join_fn": detection_join, "micro_batch": micro_batch},
    )


def test_collating_is_shared_and_joining_is_done_once_per_batch():
    sizes = []

    def join(parts):
        sizes.append([len(part) for part in parts])
        return [label for part in parts for _, label in part]

    batches = list(Loader(Numbers(12), 6, num_workers=2, collate_fn=list, join_fn=join, micro_batch=2))
    assert batches == [list(range(6)), list(range(6, 12))]
    assert sizes == [[2, 2, 2], [2, 2, 2]]


@pytest.mark.parametrize("kind", ["nested", "dict", "tuple", "namedtuple", "user mapping", "string in dict"])
def test_join_rows_joins_the_results_of_the_default_collate(kind):
    assert_same_epochs(Kinds(kind), batch_size=6, collate_fn=default_collate, ours={"join_fn": join_rows})


def test_cat_rows_copies_nothing_if_the_parts_are_adjacent_in_memory():
    joined = []

    def join(parts):
        joined.append((cat_rows([x for x, _ in parts]), parts[0][0].data_ptr()))
        return joined[-1][0]

    batches = list(Loader(Numbers(12), 6, num_workers=2, collate_fn=default_collate, join_fn=join, micro_batch=2))
    assert [batch.data_ptr() for batch in batches] == [pointer for _, pointer in joined]
    assert [batch.shape for batch in batches] == [(6, 2, 4)] * 2


def test_cat_rows_of_other_parts_is_torch_cat():
    whole = torch.arange(24.0).reshape(6, 4)
    for parts in ([whole[:2], whole[4:]], [whole[:2], whole[2:].clone()], [whole[:, :2], whole[:, 2:]], [whole]):
        assert torch.equal(cat_rows(parts), torch.cat(parts))


def test_join_rows_refuses_types_that_it_cannot_join():
    with pytest.raises(TypeError, match="write your own join_fn"):
        join_rows([3, 4])


def test_the_result_of_a_join_fn_is_safe_to_keep():
    options = {"num_workers": 2, "collate_fn": default_collate, "join_fn": join_rows}
    assert equal(list(Loader(Numbers(100), 4, **options)), list(DataLoader(Numbers(100), 4)))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("batch_size", [2, None])
def test_nested_tensors_arrive_complete(layout, batch_size):
    collate_fn = list if batch_size else None
    streams = [
        [each for batch in cls(Nested(layout), batch_size, num_workers=1, collate_fn=collate_fn) for each in batch]
        for cls in (DataLoader, Loader)
    ]
    ours, theirs = ([part for nested in stream for part in nested.unbind()] for stream in streams)
    assert equal(ours, theirs)


def test_a_batch_of_nested_tensors_needs_a_collate_function():
    for cls in (DataLoader, Loader):
        with pytest.raises(RuntimeError, match="nested tensors are not currently supported by the default collate_fn"):
            list(cls(Nested(torch.strided), 2, num_workers=1))
