"""A batch is valid for as long as it is referenced, and passes may be abandoned, repeated and interleaved."""

import copy
import gc
import pickle
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from flatout.feed.loader import Loader
from tests.feed.loader_datasets import Numbers, equal


def expected(length: int = 60, batch_size: int = 4) -> list:
    return list(DataLoader(Numbers(length), batch_size))


def test_keeping_every_batch_is_safe():
    assert equal(list(Loader(Numbers(60), 4, num_workers=2)), expected())


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_of_an_earlier_epoch_stay_valid(persistent):
    loader = Loader(Numbers(60), 4, num_workers=2, persistent_workers=persistent)
    kept = [batch for _ in range(3) for batch in loader]
    assert equal(kept, expected() * 3)


def test_a_slice_keeps_its_batch():
    rows = [images[1:, 0] for images, _ in Loader(Numbers(60), 4, num_workers=2)]
    assert equal(rows, [images[1:, 0] for images, _ in expected()])


def test_a_numpy_view_keeps_its_batch():
    kept = [images.numpy()[:, 1:][..., 0] for images, _ in Loader(Numbers(60), 4, num_workers=2)]
    assert all(
        (mine == theirs.numpy()[:, 1:][..., 0]).all() for mine, (theirs, _) in zip(kept, expected(), strict=True)
    )


def test_a_single_kept_tensor_prevents_its_slot_from_being_refilled():
    kept = [labels for number, (_, labels) in enumerate(Loader(Numbers(60), 4, num_workers=2)) if number % 3 == 0]
    assert equal(kept, [labels for number, (_, labels) in enumerate(expected()) if number % 3 == 0])


def test_batches_outlive_their_loader():
    batches = iter(Loader(Numbers(60), 4, num_workers=2))
    kept = [next(batches) for _ in range(3)]
    del batches
    gc.collect()
    assert equal(kept, expected()[:3])


def test_an_ordinary_loop_gets_views_and_one_that_keeps_all_batches_gets_copies():
    loader = Loader(Numbers(60), 4, num_workers=2, persistent_workers=True)
    assert len({images.data_ptr() for images, _ in loader}) <= 4
    assert len({images.data_ptr() for images, _ in list(loader)}) == 15


def test_a_batch_may_be_written_to():
    for images, labels in Loader(Numbers(60), 4, num_workers=2):
        images.mul_(0)
        labels += 1
    assert equal(list(Loader(Numbers(60), 4, num_workers=2)), expected())


def test_a_tensor_has_a_storage_of_its_own():
    images, labels = next(iter(Loader(Numbers(60), 4, num_workers=2)))
    assert (images.untyped_storage().nbytes(), labels.untyped_storage().nbytes()) == (4 * 8 * 4, 4 * 8)
    assert images.is_contiguous()
    assert equal(pickle.loads(pickle.dumps(labels)), labels)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_may_be_left_early(persistent):
    loader = Loader(Numbers(60), 4, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        kept = []
        for batch in loader:
            kept.append(batch)
            if len(kept) == 3:
                break
        assert equal(kept, expected()[:3])
    assert equal(list(loader), expected())


@pytest.mark.parametrize("persistent", [False, True])
def test_two_passes_at_once_do_not_disturb_each_other(persistent):
    loader = Loader(Numbers(60), 4, num_workers=1, persistent_workers=persistent)
    pairs = list(zip(loader, loader, strict=True))
    assert equal([one for one, _ in pairs], expected())
    assert equal([two for _, two in pairs], expected())


def test_two_loaders_over_one_dataset():
    dataset = Numbers(60)
    pairs = list(zip(Loader(dataset, 4, num_workers=1), Loader(dataset, 5, num_workers=1), strict=False))
    assert equal([one for one, _ in pairs], expected()[:12])


def test_an_exhausted_pass_stays_exhausted():
    batches = iter(Loader(Numbers(5), 4, num_workers=1))
    assert len(list(batches)) == 2
    assert next(batches, None) is None


def test_the_iterator_is_its_own_iterator_and_has_a_length():
    loader = Loader(Numbers(60), 4, num_workers=1)
    batches = iter(loader)
    assert iter(batches) is batches
    assert len(batches) == len(loader) == 15


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def wait_until_gone(pids: set[int]) -> None:
    deadline_s = time.monotonic() + 5
    while pids & children() and time.monotonic() < deadline_s:
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["exhausted", "left", "dropped"])
def test_no_process_is_left_behind(how):
    before = children()
    loader = Loader(Numbers(60), 4, num_workers=2, persistent_workers=how == "dropped")
    batches = iter(loader)
    next(batches)
    assert len(children() - before) == 3
    if how == "exhausted":
        list(batches)
    del batches, loader
    gc.collect()
    psutil.wait_procs([psutil.Process(pid) for pid in children() - before], timeout=5)
    assert not children() - before


def test_persistent_workers_stay_and_others_do_not():
    # Ignore processes that other tests of this session keep running.
    before = children()
    for persistent in (True, False):
        loader = Loader(Numbers(12), 4, num_workers=1, persistent_workers=persistent)
        list(loader)
        first = children() - before
        list(loader)
        if not persistent:
            wait_until_gone(first)
        assert bool(children() & first) == persistent
        del loader
        gc.collect()
        wait_until_gone(children() - before)


def test_a_change_of_the_dataset_reaches_the_workers_of_the_next_epoch():
    dataset = Numbers(8)
    loader = Loader(dataset, 4, num_workers=1)
    assert len(list(loader)) == 2
    dataset.__class__ = type("Doubled", (Numbers,), {"__getitem__": lambda self, index: (torch.ones(1), index * 2)})
    assert torch.cat([labels for _, labels in loader]).tolist() == list(range(0, 16, 2))


def test_a_loader_can_be_copied_and_pickled():
    loader = Loader(Numbers(12), 4, num_workers=1, persistent_workers=True)
    list(loader)
    for clone in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert equal(list(clone), expected(12))
