"""The interface of torch's DataLoader: arguments, attributes, length, and clear messages for invalid arguments."""

import inspect
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import flatout
from flatout.errors import ConfigError
from flatout.feed.loader import Loader
from tests.feed.loader_datasets import Numbers, equal


def test_every_argument_of_the_dataloader_is_there_in_the_same_place_with_the_same_default():
    theirs = inspect.signature(DataLoader.__init__).parameters
    ours = inspect.signature(Loader.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default and ours[name].kind == theirs[name].kind for name in theirs)
    assert list(ours)[len(theirs) :] == ["micro_batch", "join_fn"]


def test_a_loader_is_an_instance_of_dataloader():
    assert isinstance(Loader(Numbers()), DataLoader)
    assert flatout.Loader is Loader


@pytest.mark.parametrize("workers", [0, 2])
def test_attributes_are_those_of_a_dataloader(workers):
    dataset, generator = Numbers(), torch.Generator()
    theirs, ours = (
        cls(dataset, 4, shuffle=True, num_workers=workers, generator=generator, drop_last=True)
        for cls in (DataLoader, Loader)
    )
    for name in (
        *("dataset", "batch_size", "num_workers", "drop_last", "timeout", "generator", "collate_fn", "pin_memory"),
        *("prefetch_factor", "persistent_workers", "worker_init_fn", "multiprocessing_context", "in_order"),
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert type(ours.sampler) is type(theirs.sampler)
    assert type(ours.batch_sampler) is type(theirs.batch_sampler)


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}, {}])
def test_the_length_is_that_of_a_dataloader(options):
    assert len(Loader(Numbers(), num_workers=1, **options)) == len(DataLoader(Numbers(), **options))


def test_a_length_that_the_sampler_does_not_know_is_a_type_error():
    for cls in (DataLoader, Loader):
        with pytest.raises(TypeError):
            len(cls(Numbers(), 4, sampler=iter([1, 2])))


@pytest.mark.parametrize("name", ["batch_size", "dataset", "sampler", "drop_last"])
def test_attributes_that_must_not_change_cannot_be_set(name):
    with pytest.raises(ValueError, match=name):
        setattr(Loader(Numbers()), name, None)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 3},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"num_workers": 1, "multiprocessing_context": "teleport"},
        {"multiprocessing_context": "fork"},
        {"num_workers": 1, "prefetch_factor": -1},
    ],
    ids=str,
)
def test_options_that_torch_refuses_are_refused_with_the_same_class(options):
    for cls in (DataLoader, Loader):
        with pytest.raises(ValueError, match=r"\w"):
            cls(Numbers(), **options)


def test_a_context_of_the_wrong_type_is_a_type_error():
    for cls in (DataLoader, Loader):
        with pytest.raises(TypeError, match="context"):
            cls(Numbers(), num_workers=1, multiprocessing_context=3)


def test_an_iterable_dataset_is_refused_with_advice():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(ConfigError, match=r"Endless is an IterableDataset.*use torch\.utils\.data\.DataLoader"):
        Loader(Endless())


@pytest.mark.parametrize("micro_batch", [0, -3, "much", 1.5])
def test_an_invalid_micro_batch_is_refused(micro_batch):
    with pytest.raises(ConfigError, match="micro_batch="):
        Loader(Numbers(), micro_batch=micro_batch)


@pytest.mark.parametrize("options", [{"join_fn": sum}, {"join_fn": sum, "collate_fn": list, "batch_size": None}])
def test_a_join_fn_without_collate_fn_or_batch_size_is_refused(options):
    with pytest.raises(ConfigError, match="join_fn needs a collate_fn and a batch_size"):
        Loader(Numbers(), **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_dataset_gives_no_batches(workers):
    assert list(Loader(Numbers(0), 4, num_workers=workers)) == []
    assert list(Loader([], 4, num_workers=workers)) == []


def test_an_empty_dataset_cannot_be_shuffled_as_in_torch():
    for cls in (DataLoader, Loader):
        with pytest.raises(ValueError, match="num_samples"):
            cls(Numbers(0), 4, shuffle=True)


def test_more_workers_than_samples():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, where there are fewer cores than workers
        loader = Loader(Numbers(3), 2, num_workers=5)
        assert equal(list(loader), list(DataLoader(Numbers(3), 2, num_workers=5)))


@pytest.mark.parametrize("prefetch_factor", [1, 2, 8])
def test_any_prefetch_factor_gives_the_same_batches(prefetch_factor):
    loader = Loader(Numbers(), 4, num_workers=2, prefetch_factor=prefetch_factor)
    assert equal(list(loader), list(DataLoader(Numbers(), 4)))
