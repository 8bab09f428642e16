"""Datasets for comparing Loader with torch's DataLoader; in a module, so that spawned workers can import them."""

import collections
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from flatout.feed.loader import Loader, cat_rows


class Point(NamedTuple):
    x: torch.Tensor
    y: int


class Named(collections.UserDict):
    """A mapping that torch clones."""


SAMPLES: dict[str, Any] = {
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "scalar tensor": lambda i: torch.tensor(i),
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 3 == 0,
    "string": lambda i: f"name {i}",
    "bytes": lambda i: bytes([i % 256]) * (i % 5),
    "array": lambda i: np.arange(6, dtype=np.float32).reshape(2, 3) + i,
    "uint8 array": lambda i: np.full((3, 4, 5), i % 256, np.uint8),
    "int16 array": lambda i: np.full(3, i, np.int16),
    "empty array": lambda i: np.empty((0, 4), np.float32),
    "strided array": lambda i: np.arange(12).reshape(3, 4).T[::2] + i,
    "numpy scalar": lambda i: np.float32(i),
    "numpy bool": lambda i: np.bool_(i % 2),
    "bfloat16": lambda i: torch.full((3,), float(i), dtype=torch.bfloat16),
    "complex": lambda i: torch.tensor([complex(i, -i)]),
    "transposed": lambda i: torch.arange(6.0).reshape(2, 3).T + i,
    "tuple": lambda i: (torch.ones(2) * i, i),
    "list": lambda i: [np.ones(2) * i, float(i)],
    "dict": lambda i: {"image": torch.ones(2, 2) * i, "label": i},
    "namedtuple": lambda i: Point(torch.ones(2) * i, i),
    "user mapping": lambda i: Named(a=torch.ones(2) * i, b=i),
    "nested": lambda i: {"a": (torch.ones(2) * i, [i, {"deep": np.ones(3) * i}]), "b": Point(torch.zeros(1) + i, i)},
    "string in tuple": lambda i: (torch.ones(1) * i, f"{i}.jpg"),
    "string in dict": lambda i: {"path": f"{i}.jpg", "x": torch.ones(1) * i},
    "strings in list": lambda i: [f"{i}", f"{-i}"],
    "tuple subclass of one": lambda i: (torch.ones(1) * i,),
    "numbers in tuple": lambda i: (i, float(i), i % 2 == 0),
}


class Kinds(Dataset):
    """One kind of sample from SAMPLES."""

    def __init__(self, kind: str, length: int = 23) -> None:
        self.kind = kind
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return SAMPLES[self.kind](index)


class Numbers(Dataset):
    """Sample i is (an image full of i, i)."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((2, 4), float(index)), index


class Batched(Numbers):
    """Fetches several samples in one call."""

    def __getitems__(self, indices):
        assert isinstance(indices, list)
        return [(torch.full((2, 4), 100.0 + index), index) for index in indices]


class Keyed(Dataset):
    """Samples under names, without a length."""

    def __getitem__(self, key):
        return len(key), key


class Sizes(Dataset):
    """Keys are (index, side): the batch sampler chooses the image size."""

    def __getitem__(self, key):
        index, side = key
        return torch.full((1, side, side), float(index))


class Growing(Dataset):
    """Samples of different length, for collate functions that pad."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.arange(1.0, 2 + index)


class Mixed(Dataset):
    """The label is an int in some samples and a float in others."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.ones(2) * index, float(index) if index % 5 == 3 else index


class Shapes(Dataset):
    """The shape changes in the middle, at a batch boundary of 6."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((2, 3 if index < 12 else 5), float(index)), index


class Drawing(Dataset):
    """Draws from every global generator."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.rand(2), np.random.random_sample(2), random.random(), index  # noqa: NPY002


class DrawingMuch(Drawing):
    """Random numbers with text that becomes longer than the room that is reserved at first."""

    def __getitem__(self, index):
        return *super().__getitem__(index), "long text " * 100 * index


class SometimesDrawing(Dataset):
    """Draws random numbers for a few samples only."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.rand(()) if index % 7 == 6 else torch.tensor(float(index))


class Nested(Dataset):
    """Nested tensors, which the default collate does not support."""

    def __init__(self, layout: torch.layout) -> None:
        self.layout = layout

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.nested.nested_tensor([torch.ones(index + 1), torch.zeros(2)], layout=self.layout)


class InitialSeed(Dataset):
    """Returns the seed of torch's generator, and may draw from it."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if self.draws:
            torch.rand(())
        return torch.initial_seed(), get_worker_info().seed


class Waiting(Dataset):
    """Samples can only be read when two workers read one at the same time."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("fork")
        self.num_at = context.Value("i", 0)
        self.both = context.Event()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with self.num_at.get_lock():
            self.num_at.value += 1
            if self.num_at.value == 2:
                self.both.set()
        assert self.both.wait(20)
        return torch.full((3,), float(index))


class Failing(Numbers):
    """Cannot read one sample."""

    def __init__(self, error: Exception, at: int = 9) -> None:
        super().__init__()
        self.error = error
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return super().__getitem__(index)


class AwkwardError(Exception):
    """Cannot be unpickled: takes two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class WhoReads(Dataset):
    """Returns information about the worker that reads."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        info = get_worker_info()
        same = info.dataset is self
        return os.getpid(), info.id, info.num_workers, info.seed, torch.get_num_threads(), same


class KillsOnce(Numbers):
    """The first worker that reads sample 9 dies."""

    def __init__(self, folder: Path) -> None:
        super().__init__(40)
        self.mark = folder / "died"

    def __getitem__(self, index):
        if index == 9 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class KillsAlways(Numbers):
    """Sample 9 kills every worker that reads it."""

    def __getitem__(self, index):
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Slow(Numbers):
    """Takes a second for one sample."""

    def __getitem__(self, index):
        if index == 9:
            time.sleep(1.0)
        return super().__getitem__(index)


class Threaded(Numbers):
    """Reads in a thread of its own, which is started by the constructor and by unpickling."""

    def __init__(self, length: int = 23) -> None:
        super().__init__(length)
        self._start()

    def _start(self) -> None:
        self.asked, self.answer, self.wanted = threading.Event(), threading.Event(), 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self.asked.wait():
            self.asked.clear()
            self.result = super().__getitem__(self.wanted)
            self.answer.set()

    def __getstate__(self):
        return {"length": self.length}

    def __setstate__(self, state):
        self.__dict__ = state
        self._start()

    def __getitem__(self, index):
        self.wanted = index
        self.asked.set()
        assert self.answer.wait(20)
        self.answer.clear()
        return self.result


class PoolInGetitem(Numbers):
    """Starts a thread for every sample."""

    def __getitem__(self, index):
        results = []
        thread = threading.Thread(target=lambda: results.append(Numbers.__getitem__(self, index)))
        thread.start()
        thread.join()
        return results[0]


class Unpicklable(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Bag:
    """A custom batch type."""

    def __init__(self, samples: list[tuple[torch.Tensor, int]]) -> None:
        self.images = torch.stack([image for image, _ in samples])
        self.again = self.images
        self.labels = [label for _, label in samples]


def pad(samples: list[torch.Tensor]) -> dict[str, Any]:
    padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"padded": padded, "lengths": [len(sample) for sample in samples]}


def as_pairs(samples: list[tuple[torch.Tensor, int]]) -> dict[str, Any]:
    return {"x": torch.stack([x for x, _ in samples]), "y": np.array([y for _, y in samples]), "n": len(samples)}


def detection_collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, and boxes [T, 2] of (row in the batch, label): index % 3 boxes each."""
    boxes = [torch.tensor([[row, label]] * (label % 3)).reshape(-1, 2) for row, (_, label) in enumerate(samples)]
    return torch.stack([x for x, _ in samples]), torch.cat(boxes)


def detection_join(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.cumsum([0] + [len(images) for images, _ in parts])
    boxes = [each + torch.tensor([row, 0]) for (_, each), row in zip(parts, rows, strict=False)]
    return cat_rows([images for images, _ in parts]), torch.cat(boxes)


def noisy_collate(samples: list[Any]) -> Any:
    return default_collate(samples), torch.rand(3)


def only_even(samples: list[tuple[torch.Tensor, int]]) -> Any:
    return default_collate([sample for sample in samples if sample[1] % 2 == 0])


def count_start(worker: int) -> None:
    """A worker_init_fn that creates a file."""
    Path(os.environ["LOADER_TEST_FOLDER"], f"{worker}-{os.getpid()}").touch()


def do_nothing(worker: int) -> None:
    pass


def seed_all_alike(worker: int) -> None:
    torch.manual_seed(12345)
    np.random.seed(67)  # noqa: NPY002
    random.seed(89)


def seed_by_worker(worker: int) -> None:
    """As recommended by PyTorch's notes on reproducibility."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def fail_to_start(worker: int) -> None:
    raise OSError(5, f"worker {worker} has no disk")


def equal(ours: Any, theirs: Any) -> bool:
    """Whether two batches are equal in type, dtype, shape, values and containers."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if isinstance(ours, collections.abc.Mapping):
        return list(ours) == list(theirs) and all(equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return ours == theirs


def assert_same_epochs(
    dataset: Any, *, epochs: int = 1, num_workers: int = 2, ours: dict[str, Any] | None = None, **options: Any
) -> None:
    """Assert that a Loader with workers yields the same batches as a DataLoader without (which is faster)."""
    streams = []
    for cls, extra in ((DataLoader, {}), (Loader, {"num_workers": num_workers} | (ours or {}))):
        torch.manual_seed(5)
        made = {name: option() if name in MADE and callable(option) else option for name, option in options.items()}
        loader = cls(dataset, **made, **extra)
        streams.append([list(loader) for _ in range(epochs)])
    theirs, mine = streams
    assert [len(epoch) for epoch in mine] == [len(epoch) for epoch in theirs]
    for my_epoch, their_epoch in zip(mine, theirs, strict=True):
        for number, (my_batch, their_batch) in enumerate(zip(my_epoch, their_epoch, strict=True)):
            assert equal(my_batch, their_batch), f"batch {number}: {my_batch} is not {their_batch}"


MADE = {"sampler", "batch_sampler", "generator"}
"""Options with state: given as functions, which are called once for each loader."""
