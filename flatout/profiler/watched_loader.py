"""A loader that tells when a batch is asked for and when it arrives, and looks into its workers.

For the time of a block the loader gets a class of its own with another `__iter__`, so that `for batch in loader` in
code that knows nothing of it is seen; a torch DataLoader also gets a probe around its dataset and collate function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from flatout.errors import ConfigError
from flatout.profiler import clock
from flatout.profiler.loader_probe import Desk, Tables, TimedCollate, TimedDataset, TimedStream
from flatout.profiler.measurement import WAIT


class Looking(Protocol):
    """Who looks at the loop; see observation.py."""

    def is_here(self) -> bool:
        """Whether it looks at this thread."""

    def pass_begins(self) -> None: ...
    def after_step(self) -> None:
        """After each step, before the next batch is fetched."""

    def pass_ends(self) -> None: ...


class Turnstile:
    """Between the loop and its loader: a step begins when a batch is asked for, and ends when the next one is."""

    def __init__(self, looking: Looking, samples_of: Callable[[Any], int]) -> None:
        self._looking, self._samples_of = looking, samples_of

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, with marks around the wait for each."""
        if not self._looking.is_here():  # another thread's marks go nowhere: its batches pass as they are
            yield from batches
            return
        clock.step_ended(0)  # what lies between two passes belongs to no step
        self._looking.pass_begins()
        try:
            while True:
                with clock.stage(WAIT):
                    try:
                        batch = next(batches)
                    except StopIteration:
                        break
                yield batch
                clock.step_ended(self._samples_of(batch))
                self._looking.after_step()
            clock.step_ended(0)
        finally:  # also when the loop breaks off
            self._looking.pass_ends()


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
    from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe
    from torch.utils.data.dataloader import _DatasetKind

    # Workers that already run (persistent ones of an earlier pass) have the dataset without a probe; and a DataLoader
    # sets the random numbers of a data pipe that it knows to be one.
    cannot = not isinstance(loader, DataLoader) or getattr(loader, "_iterator", None) is not None
    if cannot or isinstance(loader.dataset, IterDataPipe | MapDataPipe):
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
