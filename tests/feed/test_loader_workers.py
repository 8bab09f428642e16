"""Workers behave as torch's documentation describes, and failures are handled."""

import logging
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.errors import ConfigError
from flatout.feed.loader import Loader
from tests.feed.loader_datasets import (
    AwkwardError,
    Failing,
    Growing,
    KillsAlways,
    KillsOnce,
    Numbers,
    PoolInGetitem,
    Slow,
    Threaded,
    Unpicklable,
    Waiting,
    WhoReads,
    count_start,
    equal,
    fail_to_start,
)

BOTH = (DataLoader, 0), (Loader, 2)


def test_get_worker_info_describes_the_worker_that_reads():
    generator = torch.Generator().manual_seed(4)
    base_seed = torch.empty((), dtype=torch.int64).random_(generator=generator.clone_state()).item()
    loader = Loader(WhoReads(), 4, num_workers=2, generator=generator, micro_batch=1)
    rows = {row for batch in loader for row in zip(*(column.tolist() for column in batch), strict=True)}
    assert os.getpid() not in {pid for pid, *_ in rows}
    assert {worker for _, worker, *_ in rows} <= {0, 1}
    assert all(seed == base_seed + worker for _, worker, _, seed, _, _ in rows)
    assert {(workers, threads, same) for _, _, workers, _, threads, same in rows} == {(2, 1, True)}


def test_there_is_no_worker_info_in_the_trainer():
    list(Loader(Numbers(4), 2, num_workers=1))
    assert torch.utils.data.get_worker_info() is None


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_init_fn_runs_once_in_each_worker(tmp_path, monkeypatch, start):
    monkeypatch.setenv("LOADER_TEST_FOLDER", str(tmp_path))
    loader = Loader(
        Numbers(40),
        4,
        num_workers=2,
        worker_init_fn=count_start,
        persistent_workers=True,
        multiprocessing_context=start,
    )
    for _ in range(2):
        list(loader)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["0", "1"]


def test_worker_init_fn_runs_again_in_a_worker_that_was_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("LOADER_TEST_FOLDER", str(tmp_path))
    (tmp_path / "data").mkdir()
    loader = Loader(KillsOnce(tmp_path / "data"), 4, num_workers=2, worker_init_fn=count_start)
    assert equal(list(loader), list(DataLoader(Numbers(40), 4)))
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 3


def test_an_error_in_worker_init_fn_reaches_the_trainer():
    with pytest.raises(OSError, match="has no disk"):
        list(Loader(Numbers(), 4, num_workers=1, worker_init_fn=fail_to_start))


def test_a_killed_worker_does_not_change_batches():
    loader = Loader(Numbers(400), 4, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    kept = [next(batches)]
    os.kill(loader._runtime.backend.pids()[0], signal.SIGKILL)
    kept += batches
    assert equal(kept, list(DataLoader(Numbers(400), 4)))


def test_a_sample_that_kills_its_workers_is_named():
    with pytest.raises(RuntimeError, match=r"^A sample kills the workers that read it: dataset\[9\] \(3 workers died"):
        list(Loader(KillsAlways(), 4, num_workers=2, micro_batch=2))


@pytest.mark.parametrize(
    "error", [ValueError("broken label"), KeyError("no such key"), FileNotFoundError(2, "gone", "a.jpg")]
)
@pytest.mark.parametrize("collate", ["default", "custom"])
def test_an_error_in_the_dataset_is_raised_unchanged(error, collate):
    collate_fn = None if collate == "default" else list
    with pytest.raises(type(error)) as caught:
        list(Loader(Failing(error), 4, num_workers=2, collate_fn=collate_fn))
    assert caught.value.args == error.args
    assert getattr(caught.value, "filename", None) == getattr(error, "filename", None)
    assert "reading dataset[9]" in caught.value.__notes__[0]
    assert "loader_datasets.py" in str(caught.value.__cause__)


def test_an_error_that_cannot_be_pickled_is_raised_as_a_runtime_error_with_its_text():
    with pytest.raises(RuntimeError, match="two words"):
        list(Loader(Failing(AwkwardError("two", "words")), 4, num_workers=1))


def test_the_pass_continues_after_an_error_as_in_torch():
    for cls, workers in BOTH:
        batches, seen = iter(cls(Failing(ValueError("bad")), 4, num_workers=workers)), []
        while True:
            try:
                seen.append(next(batches)[1].tolist()[0])
            except ValueError:
                seen.append(-1)
            except StopIteration:
                break
        assert seen == [0, 4, -1, 12, 16, 20]


def test_an_index_out_of_range_is_an_index_error():
    for cls, workers in BOTH:
        with pytest.raises(IndexError):
            list(cls([1, 2, 3], 2, sampler=[0, 7], num_workers=workers))


def test_an_error_in_collate_fn_is_raised_unchanged():
    for cls, workers in BOTH:
        with pytest.raises(RuntimeError, match="equal size"):
            list(cls(Growing(), 4, num_workers=workers, collate_fn=torch.stack))


def test_a_batch_that_takes_too_long_is_a_timeout_and_may_be_waited_for_again():
    batches = iter(Loader(Slow(), 4, num_workers=1, timeout=0.3))
    seen = [next(batches)[1], next(batches)[1]]
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.3 seconds"):
        next(batches)
    time.sleep(0.8)
    seen += [labels for _, labels in batches]
    assert torch.cat(seen).tolist() == list(range(23))


def test_samples_may_wait_for_each_other(monkeypatch, caplog):
    """Even the first one, which is read to find out how large batches are."""
    monkeypatch.setattr("flatout.feed.loader.passes.PROBE_WAIT_S", 0.2)
    loader = Loader(Waiting(), 2, num_workers=2, micro_batch=1, multiprocessing_context="fork", persistent_workers=True)
    for _ in range(2):
        assert torch.cat(list(loader))[:, 0].tolist() == list(range(8))
    assert "by pickle" not in caplog.text


@pytest.mark.parametrize(("dataset", "start"), [(Threaded, "spawn"), (PoolInGetitem, "fork")])
def test_a_dataset_with_threads_works_where_torchs_does(dataset, start):
    loader = Loader(dataset(), 4, num_workers=2, multiprocessing_context=start)
    assert equal(list(loader), list(DataLoader(Numbers(), 4)))


def test_an_unpicklable_dataset_raises_an_error_that_names_the_attribute():
    with pytest.raises(ConfigError, match=r"Unpicklable\.lock cannot be pickled.*'fork'"):
        list(Loader(Unpicklable(), 4, num_workers=1, multiprocessing_context="spawn"))
    assert len(list(Loader(Unpicklable(), 4, num_workers=1, multiprocessing_context="fork"))) == 6


def test_an_unpicklable_collate_function_raises_an_error_that_names_it():
    with pytest.raises(
        ConfigError, match=r"^The Loader cannot be sent .*: collate_fn cannot .*top level.*context='fork'"
    ):
        list(Loader(Numbers(), 4, num_workers=1, collate_fn=lambda each: each, multiprocessing_context="spawn"))


def test_local_classes_and_lambdas_work_with_fork():
    class Local(Numbers):
        transform = staticmethod(lambda x: x + 1)

        def __getitem__(self, index):
            return self.transform(index)

    assert torch.cat(list(Loader(Local(), 4, num_workers=1))).tolist() == list(range(1, 24))


def test_a_context_object_is_accepted():
    context = torch.multiprocessing.get_context("fork")
    loader = Loader(Numbers(), 4, num_workers=1, multiprocessing_context=context)
    assert loader.multiprocessing_context is context
    assert equal(list(loader), list(DataLoader(Numbers(), 4)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA pinning is refused with a warning")
def test_pinning_without_a_gpu_is_a_warning():
    for cls in (DataLoader, Loader):
        with pytest.warns(UserWarning, match="pin_memory"):
            assert not next(iter(cls(Numbers(), 4, num_workers=1, pin_memory=True)))[0].is_pinned()


def test_in_order_false_is_accepted_with_a_message(caplog):
    with caplog.at_level(logging.INFO):
        loader = Loader(Numbers(), 4, num_workers=2, in_order=False)
    assert "in_order=False is accepted" in caplog.text
    assert equal(list(loader), list(DataLoader(Numbers(), 4)))


def test_an_ordinary_pass_logs_no_warnings(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        list(Loader(Numbers(), 4, shuffle=True, num_workers=2))
    assert not [record for record in caplog.records if record.name.startswith("flatout.feed.loader")]


def test_a_file_that_a_dataset_opens_on_first_use_is_opened_in_workers_only(tmp_path):

    class Lazy(Numbers):
        file = None

        def __getitem__(self, index):
            self.file = self.file or (Path(tmp_path) / f"{os.getpid()}").open("w")
            return index

    dataset = Lazy()
    list(Loader(dataset, 4, num_workers=1))
    assert dataset.file is None
    assert str(os.getpid()) not in {path.name for path in tmp_path.iterdir()}
