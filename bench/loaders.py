"""The two sides of the comparison, and one pass over either.

Both are set up the way their documentation suggests, deliver shuffled batches of uint8 [B, 3, 320, 320],
and prepare nothing beyond the pass they are asked for, so that the other side can be measured next.

Dimension key:  B batch size   K batches of a pass   W workers
"""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import cv2
import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from bench.items import Sample
from flatout.feed import Batch, Feed, FeedConfig, Plan, Source

# More workers than cores is one of the questions here.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Loader(Protocol):
    """Either side. Workers and memory stay between passes."""

    def batches(self, num_batches: int) -> Iterator[Any]:
        """A new pass. Nothing is read before this call."""

    def first_byte(self, batch: Any) -> int: ...

    def close(self) -> None: ...


class TorchLoader:
    """torch.utils.data.DataLoader, or a class with the same face, with its start method and prefetch factor."""

    def __init__(
        self,
        sample: Sample,
        *,
        num_samples: int,
        batch_size: int,
        num_workers: int,
        loader_class: type[DataLoader[torch.Tensor]] = DataLoader,
        **options: Any,
    ) -> None:
        self._batches = ShuffledBatches(num_samples, batch_size)
        self._loader: DataLoader[torch.Tensor] | None = loader_class(
            ItemDataset(sample, num_samples),
            batch_sampler=self._batches,
            num_workers=num_workers,
            persistent_workers=True,
            worker_init_fn=use_one_opencv_thread,
            **options,
        )

    def batches(self, num_batches: int) -> Iterator[torch.Tensor]:
        assert self._loader is not None
        self._batches.num_batches = num_batches
        return iter(self._loader)

    def first_byte(self, batch: torch.Tensor) -> int:
        return int(batch[0, 0, 0, 0])

    def close(self) -> None:
        self._loader = None  # the DataLoader's own way: its workers end when it is dropped


class ItemDataset(Dataset[torch.Tensor]):
    """The items for a DataLoader. One generator per worker, as is usual there."""

    def __init__(self, sample: Sample, num_samples: int) -> None:
        self._sample = sample
        self._num_samples = num_samples
        self._rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._rng is None:
            self._rng = np.random.default_rng(torch.initial_seed())
        return torch.from_numpy(self._sample(index, self._rng))


class ShuffledBatches:
    """Batches of a new shuffled order each time; `num_batches` may be changed between passes."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self.num_batches = num_samples // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._num_samples)[: self.num_batches * self._batch_size]
        return iter(order.view(self.num_batches, self._batch_size).tolist())


class FlatoutLoader:
    """flatout.feed.Feed with its defaults."""

    def __init__(self, source: Source, *, batch_size: int, num_workers: int) -> None:
        # epochs=1: a pass does not read ahead into the next one, which is the other side's time.
        config = FeedConfig(workers=num_workers, epochs=1)
        self._feed = Feed(source, Plan(num_samples=len(source), batch_size=batch_size), config)
        self._num_steps = len(source) // batch_size
        self._epoch = 0

    def batches(self, num_batches: int) -> Iterator[Batch]:
        self._epoch += 1
        return self._feed.epoch(self._epoch, start=self._num_steps - num_batches)

    def first_byte(self, batch: Batch) -> int:
        return int(batch["image"][0, 0, 0, 0])

    def close(self) -> None:
        self._feed.close()


def use_one_opencv_thread(worker: int) -> None:
    """What flatout does for its workers by itself."""
    cv2.setNumThreads(1)


@dataclass(frozen=True)
class Pass:
    """When the batches of one pass arrived, in seconds after it was asked for."""

    arrival_K: np.ndarray
    main_cpu_s: float
    """CPU time of the main process, all its threads, over the whole pass."""
    workers_cpu_s: float
    """CPU time of its children: less disturbed by other programs than wall time is."""

    def steady_K(self, num_workers: int) -> np.ndarray:
        """Arrivals from the end of the first round of W batches to the end of the last but one.

        Whole rounds: DataLoader's workers may finish W batches at one moment, and counting from within
        a round would flatter or wrong it.
        """
        return self.arrival_K[num_workers - 1 : len(self.arrival_K) - num_workers]


def run_pass(loader: Loader, num_batches: int) -> Pass:
    """Take every batch of a pass as fast as they come, touching one byte of each."""
    arrivals = []
    workers_cpu_s = _children_cpu_s()
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    for batch in loader.batches(num_batches):
        loader.first_byte(batch)
        arrivals.append(time.perf_counter() - begin_s)
    main_cpu_s = time.process_time() - cpu_s
    return Pass(np.array(arrivals), main_cpu_s, _children_cpu_s() - workers_cpu_s)


def held_bytes(make: Callable[[], Loader], num_batches: int, *, still_s: float) -> int:
    """Shared memory of a new loader that has read ahead as far as it will while one batch is in use.

    That is its peak: read when nothing has changed for `still_s`.
    """
    gc.collect()  # loaders of earlier measurements that only the collector can free
    before = shared_bytes()
    loader = make()
    batches = loader.batches(num_batches)
    batch = next(batches)
    held, since_s = shared_bytes(), time.monotonic()
    while time.monotonic() - since_s < still_s:
        time.sleep(0.05)
        if (now := shared_bytes()) != held:
            held, since_s = now, time.monotonic()
    del batch
    for _ in batches:  # to the end, so that no worker is at work when the next loader is measured
        pass
    loader.close()
    return held - before


def _children_cpu_s() -> float:
    times = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return sum(each.user + each.system for each in times)


def shared_bytes() -> int:
    """Shared memory that this process and its children hold, each file counted once.

    By descriptor: both sides use nameless files, and other programs' memory must not count.
    """
    sizes: dict[tuple[int, int], int] = {}
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        folder = f"/proc/{process.pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            continue  # ended meanwhile
        for name in names:
            try:
                target, status = os.readlink(f"{folder}/{name}"), os.stat(f"{folder}/{name}")
            except OSError:
                continue  # closed meanwhile
            if target.startswith(("/dev/shm/", "/memfd:")):
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())
