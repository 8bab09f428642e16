"""Batches of the default collate equal torch's: all kinds of samples, containers and dtypes, with any workers."""

import logging

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from flatout.feed.loader import Loader
from tests.feed.loader_datasets import (
    SAMPLES,
    Batched,
    Keyed,
    Kinds,
    Mixed,
    Numbers,
    Shapes,
    Sizes,
    assert_same_epochs,
    equal,
)

BOTH = (DataLoader, 0), (Loader, 2)
STRINGS = {"string", "bytes", "string in tuple", "string in dict", "strings in list"}


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_kind_of_sample_is_collated_as_in_torch_and_only_strings_are_pickled(kind, caplog):
    with caplog.at_level(logging.INFO):
        assert_same_epochs(Kinds(kind), batch_size=6, ours={"micro_batch": 2})
    assert ("by pickle" in caplog.text) == (kind in STRINGS)


def test_a_string_is_pickled_and_that_is_logged_once(caplog):
    with caplog.at_level(logging.INFO):
        loader = Loader(Kinds("string in dict"), 6, num_workers=2)
        for _ in range(2):
            list(loader)
    assert caplog.text.count("sample['path'] is sent by pickle: a str has no fixed size") == 1


def test_values_whose_type_changes_in_different_micro_batches_are_collated_as_in_torch():
    numbers = [(1, 1), (2.5, 1), (1, 1), (1, 2.5)]  # in the first two rows, the second values are alike, then the first
    mine = list(Loader(numbers, 4, num_workers=1, micro_batch=2))
    assert equal(mine, list(DataLoader(numbers, 4)))


@pytest.mark.parametrize(("workers", "micro_batch"), [(0, 3), (1, "auto"), (1, 1), (2, 5), (2, 100)])
def test_neither_workers_nor_micro_batch_change_a_batch(workers, micro_batch):
    assert_same_epochs(Kinds("nested"), batch_size=7, num_workers=workers, ours={"micro_batch": micro_batch})


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_every_start_method_gives_the_same_batches(start):
    mine = list(Loader(Kinds("nested"), 6, num_workers=2, multiprocessing_context=start))
    assert equal(mine, list(DataLoader(Kinds("nested"), 6)))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_is_short_or_dropped(drop_last):
    assert_same_epochs(Numbers(23), batch_size=5, drop_last=drop_last)


def test_a_batch_larger_than_the_dataset_is_short():
    assert_same_epochs(Numbers(3), batch_size=10)


def test_a_batch_size_of_one_keeps_the_batch_dimension():
    assert_same_epochs(Numbers(5))


def test_without_batching_samples_come_one_by_one():
    assert_same_epochs(Kinds("nested"), batch_size=None)


def test_without_batching_a_sampler_may_yield_lists_of_indices():
    dataset = TensorDataset(torch.arange(24).reshape(12, 2))
    assert_same_epochs(dataset, batch_size=None, sampler=[[0, 1, 2], [5, 4]])


def test_getitems_is_called_for_several_samples_at_once():
    assert_same_epochs(Batched(), batch_size=6)
    assert next(iter(Loader(Batched(), 6, num_workers=1)))[0][0, 0, 0] == 100


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(Numbers(), [3, 1, 20, 7, 7]),
        ConcatDataset([Numbers(5), Numbers(8)]),
        TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10)),
        StackDataset(Numbers(9), Kinds("dict", 9)),
        torch.utils.data.random_split(Numbers(20), [12, 8], generator=torch.Generator().manual_seed(1))[0],
        list(range(17)),
        [{"x": [1, 2.0]}] * 9,
    ],
    ids=["Subset", "ConcatDataset", "TensorDataset", "StackDataset", "random_split", "list", "list of dicts"],
)
def test_torchs_own_datasets_and_plain_lists_work(dataset):
    assert_same_epochs(dataset, batch_size=4)


def test_keys_may_be_anything():
    assert_same_epochs(Keyed(), batch_size=2, sampler=["one", "three", "seventeen"])


def test_a_batch_sampler_may_choose_the_shape_of_each_batch(caplog):
    keys = [[(i, side) for i in range(4)] for side in (3, 9, 5, 9, 9, 9, 9, 9)]
    assert_same_epochs(Sizes(), batch_sampler=keys)


def test_batches_may_differ_in_length():
    assert_same_epochs(Numbers(), batch_sampler=[[1], [2, 3, 4], list(range(20)), [5, 6]])


def test_an_empty_batch_raises_what_torch_raises():
    for cls, workers in BOTH:
        with pytest.raises(IndexError):
            list(cls(Numbers(), batch_sampler=[[]], num_workers=workers))


def test_numbers_of_changing_type_are_collated_as_in_torch(caplog):
    with caplog.at_level(logging.WARNING):
        assert_same_epochs(Mixed(), batch_size=8, ours={"micro_batch": 2})
    assert "sent by pickle" in caplog.text


def test_the_shape_may_change_between_batches():
    assert_same_epochs(Shapes(), batch_size=6)


def test_a_shape_that_changes_within_a_batch_raises_what_torch_raises():
    for cls, workers in BOTH:
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            list(cls(Shapes(), 8, num_workers=workers))


def test_a_type_that_the_default_collate_does_not_support_raises_what_torch_raises():
    for cls, workers in BOTH:
        with pytest.raises(TypeError, match="default_collate: batch must contain tensors"):
            list(cls([None, None], 2, num_workers=workers))


def test_a_type_registered_with_the_default_collate_is_collated_by_its_function(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, set, lambda batch, *, collate_fn_map=None: sorted(set().union(*batch)))
    assert_same_epochs([(torch.ones(1), {i, i + 1}) for i in range(6)], batch_size=3)


def test_a_changed_default_collate_of_tensors_is_used(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map=None: sum(batch))
    assert_same_epochs(Numbers(), batch_size=4)
