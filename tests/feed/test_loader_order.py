"""Order and randomness: samplers and generators work as in torch; random numbers depend on the position only."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flatout.feed.loader import Loader
from tests.feed.loader_datasets import (
    Drawing,
    DrawingMuch,
    InitialSeed,
    Numbers,
    SometimesDrawing,
    WhoReads,
    assert_same_epochs,
    do_nothing,
    equal,
    noisy_collate,
    seed_all_alike,
    seed_by_worker,
)


def labels(loader) -> list[int]:
    return [label for _, batch in loader for label in batch.tolist()]


def test_shuffling_by_the_global_seed_gives_torchs_order_in_every_epoch():
    assert_same_epochs(Numbers(), batch_size=5, shuffle=True, epochs=3)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_generator_gives_torchs_order_and_is_left_in_the_same_state(persistent):
    ends = []
    for cls in (DataLoader, Loader):
        generator = torch.Generator().manual_seed(9)
        loader = cls(Numbers(), 5, shuffle=True, num_workers=2, generator=generator, persistent_workers=persistent)
        ends.append(([labels(loader) for _ in range(3)], generator.get_state()))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_the_global_generator_is_left_in_the_same_state():
    states = []
    for cls in (DataLoader, Loader):
        torch.manual_seed(3)
        list(cls(Numbers(), 5, shuffle=True, num_workers=1))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SequentialSampler(Numbers()),
        lambda: RandomSampler(Numbers(), replacement=True, num_samples=31),
        lambda: SubsetRandomSampler([1, 3, 5, 7, 9, 11]),
        lambda: WeightedRandomSampler([0.1 + i for i in range(23)], 40),
        lambda: DistributedSampler(Numbers(), num_replicas=2, rank=1, shuffle=True, seed=4),
        lambda: [4, 4, 2, 0],
        lambda: range(22, -1, -3),
    ],
    ids=["sequential", "replacement", "subset", "weighted", "distributed", "list", "range"],
)
def test_samplers_decide_the_order(sampler):
    assert_same_epochs(Numbers(), batch_size=4, sampler=sampler, epochs=2)


def test_a_batch_sampler_decides_the_batches():
    assert_same_epochs(
        Numbers(), batch_sampler=lambda: BatchSampler(RandomSampler(Numbers()), 4, drop_last=True), epochs=2
    )


def test_set_epoch_of_a_distributed_sampler_takes_effect():
    streams = []
    for cls, workers in ((DataLoader, 0), (Loader, 2)):
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0, shuffle=True)
        loader, epochs = cls(Numbers(), 4, sampler=sampler, num_workers=workers), []
        for epoch in (0, 1, 2):
            sampler.set_epoch(epoch)
            epochs.append(labels(loader))
        streams.append(epochs)
    assert streams[0] == streams[1]
    assert streams[1][0] != streams[1][1]


def test_an_endless_sampler_is_only_read_as_far_as_needed():
    pulled = []

    def forever():
        while True:
            pulled.append(len(pulled))
            yield len(pulled) % 23

    loader = Loader(Numbers(), 4, sampler=forever(), num_workers=2)
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    assert len(pulled) < 4 * 9 + 4 * 16


def test_the_sampler_is_not_iterated_early_for_the_next_epoch():
    iterated = []

    class Counted:
        def __iter__(self):
            iterated.append(True)
            return iter(range(8))

    loader = Loader(Numbers(), 4, sampler=Counted(), num_workers=1, persistent_workers=True)
    list(loader)
    assert len(iterated) == 1


def test_the_error_of_a_sampler_is_raised_and_the_loader_recovers():
    fails = [True]

    class Sometimes:
        def __iter__(self):
            yield from range(6)
            if fails:
                raise KeyError("no more indices")
            yield from range(6, 9)

    loader = Loader(Numbers(), 3, sampler=Sometimes(), num_workers=1)
    with pytest.raises(KeyError, match="no more indices"):
        list(loader)
    fails.clear()
    assert labels(loader) == list(range(9))


def stream(dataset, workers: int, epochs: int = 2, **options):
    torch.manual_seed(8)
    loader = Loader(dataset, 6, num_workers=workers, **options)
    return [batch for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("dataset", [Drawing(), SometimesDrawing()], ids=["always", "sometimes"])
def test_a_random_dataset_does_not_depend_on_workers_or_micro_batches(dataset):
    streams = [stream(dataset, 1), stream(dataset, 2), stream(dataset, 2, micro_batch=1, prefetch_factor=3)]
    assert equal(streams[0], streams[1])
    assert equal(streams[0], streams[2])


@pytest.mark.parametrize("persistent", [False, True])
def test_random_numbers_differ_for_every_sample_and_epoch(persistent):
    batches = stream(Drawing(), 2, epochs=2, persistent_workers=persistent)
    drawn = torch.cat([batch[0][:, 0] for batch in batches])
    assert len(drawn) == 48
    assert len(set(drawn.tolist())) == 48


def test_different_seeds_give_different_random_numbers():
    torch.manual_seed(1)
    one = next(iter(Loader(Drawing(), 6, num_workers=1)))
    torch.manual_seed(2)
    two = next(iter(Loader(Drawing(), 6, num_workers=1)))
    assert not torch.equal(one[0], two[0])


def test_a_random_collate_does_not_depend_on_workers():
    one, two = (stream(Numbers(), workers, collate_fn=noisy_collate) for workers in (1, 2))
    assert equal(one, two)
    assert len({tuple(noise.tolist()) for _, noise in one}) == len(one)


@pytest.mark.parametrize("draws", [False, True])
def test_the_seed_of_a_sample_fits_an_integer_of_64_bits(draws):
    """Half of all unsigned 64-bit numbers do not, and collating them would fail."""
    torch.manual_seed(8)
    seeds = torch.cat([seed for seed, _ in Loader(InitialSeed(draws), 6, num_workers=2)])
    assert seeds.dtype == torch.int64
    assert seeds.min() >= 0


def test_a_dataset_that_draws_nothing_gets_the_seed_of_its_worker():
    """Datasets use it to seed generators of their own, which must not be the same in every worker."""
    for batch in Loader(InitialSeed(draws=False), 6, num_workers=2, micro_batch=1):
        assert torch.equal(*batch)


@pytest.mark.parametrize(
    "options",
    [
        {"worker_init_fn": do_nothing},
        {"worker_init_fn": seed_all_alike},
        {"worker_init_fn": seed_by_worker},
        {"persistent_workers": True},
        {"collate_fn": noisy_collate, "shuffle": True},
        {"batch_size": None},
        {"dataset": DrawingMuch()},
    ],
    ids=["nothing", "alike", "by worker", "persistent", "collate", "unbatched", "much"],
)
def test_with_a_worker_init_fn_random_numbers_are_torchs(options):
    streams = []
    for cls in (DataLoader, Loader):
        torch.manual_seed(5)
        arguments = {"dataset": Drawing(), "batch_size": 5, "num_workers": 2, "worker_init_fn": do_nothing, **options}
        loader = cls(**arguments)
        streams.append([batch for _ in range(2) for batch in loader])
    assert equal(*streams)


@pytest.mark.parametrize("workers", [1, 2])
def test_with_a_worker_init_fn_workers_make_whole_batches_round_robin(workers):
    loader = Loader(WhoReads(), 4, num_workers=workers, worker_init_fn=do_nothing, persistent_workers=True)
    for _ in range(2):
        assert [set(ids.tolist()) for _, ids, *_ in loader] == [{batch % workers} for batch in range(6)]


def test_a_worker_init_fn_may_be_set_and_removed_between_epochs():
    """Training frameworks do that with loaders that are passed to them."""
    loader = Loader(WhoReads(), 4, num_workers=2)
    for worker_init_fn in (None, do_nothing, None):
        loader.worker_init_fn = worker_init_fn
        ids = [set(ids.tolist()) for _, ids, *_ in loader]
        assert worker_init_fn is None or ids == [{batch % 2} for batch in range(6)]
    assert len(ids) == 6
