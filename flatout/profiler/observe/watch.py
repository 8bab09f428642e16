"""Watch any PyTorch training loop: where its time goes, why, and how fast each remedy would make it.

    with flatout.profiler.watch(loader, model, optimizer, loss_fn=loss_fn) as watched:
        for images, labels in loader:
            ...                                     # any plain loop, unchanged
    print(watched.text())

The first steps warm up and are not measured; in the next few the host's waits are counted, and on a GPU two are traced;
the others are timed.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from flatout.clock import clock
from flatout.errors import ConfigError
from flatout.profiler.measurement import WAIT
from flatout.profiler.observe.hooks import code_of, each_of, stages_around
from flatout.profiler.observe.loader_probe import TimedDataset, TimedStream, WorkerTable, timed_collate
from flatout.profiler.observe.network_runs import kept_calls, network_runs
from flatout.profiler.observe.observation import ALL_PHASES, Observation
from flatout.profiler.observe.recorder import StepRecorder
from flatout.profiler.observe.summary import FeedWorkers, ProbedWorkers, WorkerObserver
from flatout.profiler.outcome import Profile
from flatout.profiler.verdict import Remedy, Trial

logger = logging.getLogger(__name__)


@contextmanager
def watch(
    loader: Any, model: Any, optimizer: Any, *, loss_fn: Any = None, title: str = "", trials: Sequence[Trial] = ()
) -> Iterator[Profile]:
    """Watch the training loop inside the block. `loss_fn`: a module or function, shown as a stage of its own.

    Several models or optimizers are given as a list or a dict; None: there is none to watch. The profile is complete
    when the block has ended.
    """
    if isinstance(clock.recorder(), StepRecorder):
        raise ConfigError("This thread is already being watched. End that watch() before another one begins.")
    code = code_of(loss_fn)
    a_step = "A step is a batch of the loader that watch() was given: pass it the object that your loop iterates."
    functions = {code: "loss"} if code else {}
    observation = Observation(WorkerObserver(), functions=functions, title=title, a_step=a_step)
    marked, workers = partial(marked_steps, observation, SampleCounter.of_loader(loader)), ProbedWorkers()
    profile = Profile(observation, trials)
    if is_stream(loader):
        profile.reword = for_stream
    with ExitStack() as stack:
        stack.enter_context(stages_around(model, optimizer, loss_fn))
        is_probed = stack.enter_context(watching(loader, marked, workers))
        observation.workers = workers if is_probed else _unprobed_workers(loader)
        observation.attach_device()
        # Of one step, the first after the warm-up: it is not timed.
        calls = stack.enter_context(
            kept_calls(each_of(model), lambda: observation.steps_observed == ALL_PHASES.warm_up)
        )
        stack.enter_context(observation.observing())
        yield profile
    if observation.is_complete:
        profile.network_runs = network_runs(calls, round(observation.measurement.images), each_of(optimizer))


def is_stream(loader: Any) -> bool:
    """Whether a loader is a DataLoader of an IterableDataset."""
    from torch.utils.data import DataLoader, IterableDataset

    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def for_stream(remedy: Remedy) -> Remedy:
    """The remedy with a caution: each worker of a DataLoader iterates all of a stream that does not split itself."""
    if "workers" not in remedy.switch:
        return remedy
    caution = "; an IterableDataset must split its samples by get_worker_info(), or every worker yields all of them"
    return replace(remedy, change=remedy.change + caution)


def _unprobed_workers(loader: Any) -> WorkerObserver:
    from torch.utils.data import DataLoader

    is_ours = any(kind.__module__.startswith("flatout.") for kind in type(loader).__mro__)
    if is_ours and not isinstance(loader, DataLoader):
        return FeedWorkers()
    declared = getattr(loader, "num_workers", 0)
    num_workers = declared if isinstance(declared, int) else 0
    if num_workers:
        logger.warning(
            "The work of the %d loader workers is not shown: they were started before watch() began, or the loader is "
            "not a plain torch DataLoader. Begin watch() before the first pass over the loader.",
            num_workers,
        )
    return WorkerObserver(num_workers)


# Observing the loader
#
# Inside the block the loader gets a subclass of its class with another `__iter__`, so that every `for batch in loader`
# is observed, in whatever code; a torch DataLoader also gets wrappers around its dataset and collate function.


def marked_steps(observer: Observation, samples_of: Callable[[Any], int], batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a pass, with marks around the wait for each: a step begins with the request of a batch and ends
    with the next."""
    if not observer.observes_this_thread():  # marks of another thread would not be recorded
        yield from batches
        return
    clock.step_ended(0)  # the time between two passes belongs to no step
    observer.pass_begins()
    try:
        while True:
            with clock.stage(WAIT):
                try:
                    batch = next(batches)
                except StopIteration:
                    break
            yield batch
            clock.step_ended(samples_of(batch))
            observer.after_step()
        clock.step_ended(0)
    finally:  # also when the loop is left early
        observer.pass_ends()


@contextmanager
def watching(loader: Any, marked: Callable[[Iterator[Any]], Iterator[Any]], workers: ProbedWorkers) -> Iterator[bool]:
    """Replace the batches of every pass over `loader` inside the block by `marked(batches)`; gives whether its workers
    can be observed."""
    kind = type(loader)
    body = {"__iter__": lambda self: marked(kind.__iter__(self)), "__module__": kind.__module__}
    try:
        loader.__class__ = type(kind.__name__, (kind,), body)
    except TypeError as error:
        raise ConfigError(
            f"A {kind.__name__} cannot be watched. Pass the loader object itself (a torch DataLoader, a flatout Loader "
            "or Feed, or any object of a Python class with __iter__), not a list, a generator or an iterator; or use "
            "flatout.profiler.watch_any(), which needs no loader."
        ) from error
    try:
        with probed(loader, workers) as is_probed:
            if is_probed:
                workers.pass_begins(loader)
            yield is_probed
    finally:
        loader.__class__ = kind


def runs_workers(loader: Any) -> bool:
    """Whether a DataLoader or a Loader has persistent workers from an earlier pass."""
    return getattr(loader, "_iterator", None) is not None or getattr(loader, "_runtime", None) is not None


@contextmanager
def probed(loader: Any, workers: ProbedWorkers) -> Iterator[bool]:
    """Workers that are started inside the block write into the tables; gives whether they can."""
    from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe
    from torch.utils.data.dataloader import _DatasetKind

    # Workers that already run (persistent ones of an earlier pass) have the dataset without a wrapper; and a DataLoader
    # seeds the random numbers of a data pipe only if it recognizes it as one.
    is_unsupported = not isinstance(loader, DataLoader) or runs_workers(loader)
    if is_unsupported or isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        yield False
        return
    dataset, collate = loader.dataset, loader.collate_fn
    worker_table = WorkerTable(workers.tables_of(loader))
    timed = TimedDataset if loader._dataset_kind == _DatasetKind.Map else TimedStream
    # DataLoader forbids this to keep its sampler and dataset consistent; ours has the same length and samples.
    object.__setattr__(loader, "dataset", timed(dataset, worker_table))
    # flatout's Loader has its workers collate together by default, but not with a function that it does not know.
    if getattr(loader, "_collate_mode", "") != "rows":
        loader.collate_fn = partial(timed_collate, collate, worker_table)
    try:
        yield True
    finally:
        object.__setattr__(loader, "dataset", dataset)
        loader.collate_fn = collate


# Samples per batch: loaders give tensors, pairs, dicts, tuples of images of any size, and more.

Path = tuple[Any, ...]
"""Keys and positions that lead to a part of a batch."""

FIELDS = 16
"""Fields of a batch that are searched."""
DIMS_OF_SAMPLE = 3
"""A tensor with more dimensions (images in NCHW, for example) is a whole batch."""


class SampleCounter:
    """Counts the samples of a loader's batches, by the same field of each: the last batch may be shorter."""

    def __init__(self, expected: int | None = None) -> None:
        """`expected`: samples in a full batch, if the loader has a batch size."""
        self._expected = expected
        self._path: Path | None = None

    @classmethod
    def of_loader(cls, loader: Any) -> "SampleCounter":
        """A counter that knows the batch size of the loader or of its batch sampler."""
        sizes = (getattr(source, "batch_size", None) for source in (loader, getattr(loader, "batch_sampler", None)))
        return cls(next((size for size in sizes if isinstance(size, int) and size > 0), None))

    def __call__(self, batch: Any) -> int:
        """Number of samples in a batch, at least 1."""
        lengths = dict(_lengths(batch))
        if self._path is None:
            self._path = next((path for path, length in lengths.items() if length == self._expected), None)
        if self._path in lengths:
            return max(1, lengths[self._path])
        first = next(iter(lengths.values()), 0)
        # No field is as long as a full batch: either the batch is a short one, or no field gives its length.
        return max(1, first) if self._expected is None or 0 < first < self._expected else self._expected


def _lengths(part: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """Lengths in a batch that may be its number of samples, with their paths, the most likely first."""
    if hasattr(part, "shape"):
        if len(part.shape):
            yield path, int(part.shape[0])
    elif isinstance(part, Mapping):
        for key in islice(part, FIELDS):
            yield from _lengths(part[key], (*path, key))
    elif isinstance(part, list | tuple):
        yield from _lengths_of_list(part, path)
    elif not isinstance(part, str | bytes):
        yield from _lengths_of_object(part, path)


def _lengths_of_list(part: Any, path: Path) -> Iterator[tuple[Path, int]]:
    """Lengths of a list, which holds either the fields of a batch, as in (images, labels), or its samples."""
    are_samples = bool(path) and not any(len(getattr(item, "shape", ())) > DIMS_OF_SAMPLE for item in part[:1])
    if are_samples:
        yield path, len(part)
    for place, item in enumerate(part[:FIELDS]):
        yield from _lengths(item, (*path, place))
    if not are_samples:
        yield path, len(part)


def _lengths_of_object(part: Any, path: Path) -> Iterator[tuple[Path, int]]:
    if hasattr(part, "__len__"):
        yield path, len(part)
    elif hasattr(part, "__dict__") and len(path) < DIMS_OF_SAMPLE:  # such as a dataclass; no deeper than batches are
        yield from _lengths(dict(vars(part)), path)
