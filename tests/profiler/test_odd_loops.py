"""Unusual loops: several networks, wrappers, batches of any shape, workers that cannot be observed."""

import threading
import time
from collections import UserDict
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from flatout.errors import ConfigError
from flatout.profiler import watch
from flatout.profiler.observe.watch import SampleCounter
from flatout.profiler.verdict import Remedy
from tests.profiler import slow_loops

LOSS = nn.CrossEntropyLoss()


pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timing]


def ready_loader(num=96, batch=8, **more):
    return DataLoader(slow_loops.ready_samples(num), batch_size=batch, **more)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.01)


class Numbers(Dataset):
    """Samples with a number that can be changed from outside."""

    mark = 0

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.rand(3, 32, 32), self.mark


def test_attributes_that_a_loop_sets_on_its_dataset_are_set_there():
    loader, model, seen = DataLoader(Numbers(), batch_size=8), slow_loops.small_network(), []
    with watch(loader, model, sgd(model)):
        for _, marks in loader:
            seen.append(int(marks[0]))
            loader.dataset.mark = len(seen)
    assert seen == list(range(12))
    assert loader.dataset.mark == 12


class Range(IterableDataset):
    def __init__(self):
        self.begin, self.end = 0, 64

    def __iter__(self):
        for number in range(self.begin, self.end):
            yield torch.full((3, 32, 32), float(number)), number % 2


def share_of_worker(worker):
    """As in the documentation of PyTorch."""
    info = get_worker_info()
    info.dataset.begin, info.dataset.end = 32 * worker, 32 * worker + 32


def test_more_workers_of_a_stream_come_with_a_caution():
    more = Remedy(
        what="workers 0 -> 2", change="x", step_ms=1, uncertainty=0, now_ms=2, images=1, switch={"workers": 2}
    )
    other = replace(more, switch={"cache_images": True})
    for loader, has_caution in ((DataLoader(Range(), batch_size=4), True), (ready_loader(), False)):
        with watch(loader, None, None) as watched:
            pass
        assert ("get_worker_info()" in watched.reword(more).change) == has_caution
        assert watched.reword(other) == other


def test_a_stream_that_a_worker_init_fn_splits_stays_split():
    loader, model = DataLoader(Range(), batch_size=4, num_workers=2, worker_init_fn=share_of_worker), nn.Flatten()
    with watch(loader, model, None):
        seen = sorted(int(number) for images, _ in loader for number in images[:, 0, 0, 0])
    assert seen == list(range(64))


@dataclass
class Sample:
    images: torch.Tensor


IMAGES = torch.zeros(8, 3, 4, 4)


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, torch.zeros(8)),
        [[IMAGES, IMAGES], torch.zeros(8)],
        (tuple(IMAGES), tuple({"boxes": torch.zeros(5, 4)} for _ in range(8))),
        {"name": ["a long name"] * 8, "image": IMAGES},
        UserDict(input_ids=torch.zeros(8, 16), mask=torch.zeros(8, 16)),
        Sample(IMAGES),
        ("a name", IMAGES),
        object(),
    ],
    ids=["pair", "pairs", "detection", "names first", "user dict", "dataclass", "text first", "opaque"],
)
def test_samples_of_a_batch_are_counted_whatever_it_looks_like(batch):
    assert SampleCounter(8)(batch) == 8
    if type(batch) is not object:
        assert SampleCounter()(batch) == 8, "also without a batch size of the loader"


def test_the_last_batch_is_counted_by_the_same_field_as_the_others():
    count = SampleCounter(8)
    assert count((tuple(IMAGES), tuple(range(8)))) == 8
    assert count((tuple(IMAGES[:5]), tuple(range(5)))) == 5
    loader = ready_loader(44, batch=8, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))
    count = SampleCounter.of_loader(loader)
    assert [count(batch) for batch in loader] == [8, 8, 8, 8, 8, 4]


class Wrapper:
    """As in training frameworks: not a torch optimizer, but used like one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


def test_several_networks_optimizers_and_wrappers_are_marked():
    first, second, loader = slow_loops.small_network(), nn.Linear(2, 2), ready_loader()
    wrapper, other = Wrapper(sgd(first)), sgd(second)
    with watch(loader, {"a": first, "b": second}, [wrapper, other]) as watched:
        for images, labels in loader:
            parts = [*first.parameters(), *second.parameters()]
            gradients = torch.autograd.grad(LOSS(second(first(images)), labels), parts)
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient
            wrapper.step()
            other.step()
    runs = {row.stage: row.runs for row in watched.ledger.rows}
    assert (runs["forward"], runs["backward"], runs["optimizer"]) == (2, 1, 2)
    assert "step" not in vars(wrapper)


@pytest.mark.parametrize(("model", "optimizer"), [(lambda images: images, None), (None, object())])
def test_what_cannot_be_watched_is_refused_with_advice(model, optimizer):
    watching = watch(ready_loader(), model, optimizer)
    with pytest.raises(ConfigError, match=r"cannot be watched as (a model|an optimizer)\. Pass the"):
        watching.__enter__()


def test_a_watch_in_a_watch_is_refused():
    loader, model = ready_loader(), slow_loops.small_network()
    with watch(loader, model, sgd(model)), pytest.raises(ConfigError, match="already being watched"):
        watch(loader, model, None).__enter__()
    assert type(loader) is DataLoader


def test_a_loop_in_another_thread_has_its_own_message():
    loader, model, taken = ready_loader(), slow_loops.small_network(), []
    with watch(loader, model, sgd(model)) as watched:
        thread = threading.Thread(target=lambda: taken.extend(loader))
        thread.start()
        thread.join()
    assert len(taken) == 12
    with pytest.raises(ConfigError, match="in another thread"):
        watched.text()


class Sleepy(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.rand(3, 32, 32), index % 2


def test_workers_that_were_started_before_do_not_count_as_no_workers():
    loader = DataLoader(Sleepy(), batch_size=8, num_workers=1, persistent_workers=True)
    next(iter(loader))
    watched = slow_loops.train(loader)
    assert watched.measurement.num_workers == 1
    assert (watched.verdict.cause, list(watched.verdict.remedies)) == ("input", [])
    assert "could not be observed" in watched.verdict.sentence


def test_an_optimizer_that_reads_its_own_numbers_is_no_python_loop():
    """Adam reads a step counter per weight; the backward pass in the line above is not blamed for it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), *(nn.Linear(256, 256) for _ in range(8)))
    optimizer, loader = torch.optim.Adam(model.parameters(), foreach=False), ready_loader()
    with watch(loader, model, optimizer, loss_fn=LOSS) as watched:
        for images, labels in loader:
            LOSS(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "python loop" not in {watched.verdict.cause, *(other.cause for other in watched.verdict.others)}
    assert not watched.measurement.waits


class Busy(Dataset):
    """Arithmetic in Python, and then a line that releases the GIL."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        total = sum(number * number for number in range(80_000))
        return torch.rand(3, 32, 32), total % 2


def test_workers_of_several_epochs_are_counted_as_one():
    """Every epoch has new processes: their CPU time begins at zero, and they may sample other lines first."""
    loader, model = DataLoader(Busy(), batch_size=8, num_workers=1), slow_loops.small_network()
    optimizer = sgd(model)
    with watch(loader, model, optimizer, loss_fn=LOSS) as watched:
        for _ in range(6):
            for images, labels in loader:
                LOSS(model(images), labels).backward()
                optimizer.step()
    m = watched.measurement
    busy_ms = sum(m.lane("workers").stage_ms.values())
    assert m.worker_blocked_ms < 0.3 * busy_ms, "they never waited"
    assert m.worker_cpu_ms > 0.3 * busy_ms
    hottest = max((line for line in m.lines if line.in_worker), key=lambda line: line.ms)
    assert hottest.text.startswith("total = sum(")
