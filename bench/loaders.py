"""The two sides of the comparison of loaders, and one pass over either.

Both are set up as their documentation suggests, yield shuffled batches of uint8 [B, 3, 320, 320], and prepare nothing
beyond the requested pass, so that the other side can be measured next.

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

# More workers than cores are measured on purpose.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Loader(Protocol):
    """Either side. Workers and memory are kept between passes."""

    def batches(self, num_batches: int) -> Iterator[Any]:
        """A new pass. Nothing is read before this call."""

    def first_byte(self, batch: Any) -> int: ...

    def close(self) -> None: ...


class TorchLoader:
    """torch.utils.data.DataLoader, or a class with the same interface, with its default start method and prefetch."""

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
        self._loader = None  # a DataLoader's workers end when it is dropped


class ItemDataset(Dataset[torch.Tensor]):
    """The items as a dataset for a DataLoader, with one generator per worker, as is usual there."""

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
        # epochs=1: a pass must not read ahead into the next one, while the other side is measured.
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
    """What flatout does for its workers automatically."""
    cv2.setNumThreads(1)


@dataclass(frozen=True)
class Pass:
    """Arrival times of the batches of one pass, in seconds since it was requested."""

    arrival_K: np.ndarray
    main_cpu_s: float
    """CPU time of the main process, all its threads, over the whole pass."""
    workers_cpu_s: float
    """CPU time of its children; less affected by other programs than wall time."""

    def steady_K(self, num_workers: int) -> np.ndarray:
        """Arrivals from the end of the first round of W batches to the end of the last but one.

        Only whole rounds: DataLoader's workers may finish W batches at the same time, so counting from within a round
        would be biased.
        """
        return self.arrival_K[num_workers - 1 : len(self.arrival_K) - num_workers]


def run_pass(loader: Loader, num_batches: int) -> Pass:
    """Take the batches of a pass as fast as they come, reading one byte of each."""
    arrivals = []
    workers_cpu_s = _children_cpu_s()
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    for batch in loader.batches(num_batches):
        loader.first_byte(batch)
        arrivals.append(time.perf_counter() - begin_s)
    main_cpu_s = time.process_time() - cpu_s
    return Pass(np.array(arrivals), main_cpu_s, _children_cpu_s() - workers_cpu_s)


def held_bytes(make: Callable[[], Loader], num_batches: int, *, still_s: float) -> int:
    """Peak shared memory of a new loader: while one batch is in use and the loader has read ahead as far as it does.

    Measured when nothing has changed for `still_s`.
    """
    gc.collect()  # free the loaders of earlier measurements
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
    for _ in batches:  # to the end, so that no worker is busy when the next loader is measured
        pass
    loader.close()
    return held - before


def _children_cpu_s() -> float:
    times = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return sum(each.user + each.system for each in times)


def shared_bytes() -> int:
    """Shared memory that this process and its children hold, with each file counted once.

    Found by file descriptor: both sides use files without names, and other programs' memory must not count.
    """
    sizes: dict[tuple[int, int], int] = {}
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        folder = f"/proc/{process.pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            continue  # it has ended
        for name in names:
            try:
                target, status = os.readlink(f"{folder}/{name}"), os.stat(f"{folder}/{name}")
            except OSError:
                continue  # it was closed
            if target.startswith(("/dev/shm/", "/memfd:")):
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())
