"""A loader that tells when a batch is asked for and when it arrives, and looks into its workers.

For the time of a block the loader gets a class of its own with another `__iter__`, so that `for batch in loader` in
code that knows nothing of it is seen; a torch DataLoader also gets a probe around its dataset and collate function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flatout.errors import ConfigError
from flatout.profiler import clock
from flatout.profiler.loader_probe import Desk, Tables, TimedCollate, TimedDataset, TimedStream
from flatout.profiler.measurement import WAIT


class Turnstile:
    """Between the loop and its loader: a step begins when a batch is asked for, and ends when the next one is."""

    def __init__(self, on_step: Callable[[], None], on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        """`on_step` is called after each step, before the next batch is fetched; the others around a whole pass."""
        self._on_step, self._on_begin, self._on_end = on_step, on_begin, on_end

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, with marks around the wait for each."""
        clock.step_ended(0)  # what lies between two passes belongs to no step
        self._on_begin()
        try:
            while True:
                with clock.stage(WAIT):
                    try:
                        batch = next(batches)
                    except StopIteration:
                        break
                yield batch
                clock.step_ended(num_images(batch))
                self._on_step()
            clock.step_ended(0)
        finally:  # also when the loop breaks off
            self._on_end()


@contextmanager
def watching(loader: Any, turnstile: Turnstile) -> Iterator[Tables | None]:
    """Send every pass over `loader` through the turnstile; tables of its workers where they can be looked into."""
    kind = type(loader)
    body = {"__iter__": lambda self: turnstile.through(kind.__iter__(self)), "__module__": kind.__module__}
    try:
        loader.__class__ = type(kind.__name__, (kind,), body)
    except TypeError as error:
        raise ConfigError(
            f"A {kind.__name__} cannot be watched: give the loader object itself (a torch DataLoader, a flatout Loader "
            "or Feed, or any object of a Python class with __iter__), not a list, a generator or an iterator."
        ) from error
    try:
        with _probed(loader) as tables:
            yield tables
    finally:
        loader.__class__ = kind


@contextmanager
def _probed(loader: Any) -> Iterator[Tables | None]:
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _DatasetKind

    # Workers that already run (persistent ones of an earlier pass) have the dataset without a probe.
    if not isinstance(loader, DataLoader) or getattr(loader, "_iterator", None) is not None:
        yield None
        return
    dataset, collate = loader.dataset, loader.collate_fn
    tables = Tables(loader.num_workers)
    desk = Desk(tables)
    timed = TimedDataset if loader._dataset_kind == _DatasetKind.Map else TimedStream
    # DataLoader forbids this to keep its sampler and dataset in step; ours has the same length and samples.
    object.__setattr__(loader, "dataset", timed(dataset, desk))
    loader.collate_fn = TimedCollate(collate, desk)
    try:
        yield tables
    finally:
        object.__setattr__(loader, "dataset", dataset)
        loader.collate_fn = collate


def num_images(batch: Any) -> int:
    """Samples in a batch, by the first thing in it that has a length; 1 if nothing has."""
    if hasattr(batch, "shape") and len(batch.shape):
        return int(batch.shape[0])
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        return num_images(batch[0]) if batch else 1
    return len(batch) if hasattr(batch, "__len__") else 1
