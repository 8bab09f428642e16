"""Watch any PyTorch training loop: where its time goes, what is to blame, what each remedy would be worth.

    with flatout.profiler.watch(loader, model, optimizer, loss_fn=loss_fn) as watched:
        for images, labels in loader:
            ...                                     # any plain loop, unchanged
    print(watched.text())

The first steps warm up and are forgotten; in the next few the host's waits are counted, and on a GPU two are traced;
all others are timed.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from flatout.errors import ConfigError
from flatout.profiler import clock
from flatout.profiler.batch_size import SamplesOf
from flatout.profiler.hooks import code_of, stages_around
from flatout.profiler.observation import Observation
from flatout.profiler.outcome import Profile
from flatout.profiler.recorder import StepRecorder
from flatout.profiler.verdict import Remedy, Trial
from flatout.profiler.watched_loader import Turnstile, watching
from flatout.profiler.workers_seen import FeedWorkers, NoWorkers, ProbedWorkers, WorkerWatch

logger = logging.getLogger(__name__)


@contextmanager
def watch(
    loader: Any, model: Any, optimizer: Any, *, loss_fn: Any = None, title: str = "", trials: Sequence[Trial] = ()
) -> Iterator[Profile]:
    """Watch the loop inside the block. `loss_fn`: a module or function, to tell the loss from the rest.

    Several models or optimizers are given as a list or a dict; None: there is none to look at. What it gives is
    complete when the block has ended.
    """
    if isinstance(clock.recorder(), StepRecorder):
        raise ConfigError("This thread is being watched already: end that watch before another one begins.")
    code = code_of(loss_fn)
    observation = Observation(NoWorkers(), functions={code: "loss"} if code else {}, title=title)
    turnstile = Turnstile(observation, SamplesOf.loader(loader))
    profile = Profile(observation, trials)
    if _is_stream(loader):
        profile.reword = _for_stream
    with ExitStack() as stack:
        stack.enter_context(stages_around(model, optimizer, loss_fn))
        tables = stack.enter_context(watching(loader, turnstile))
        observation.workers = _workers_of(loader, tables)
        observation.attach_device()
        stack.enter_context(observation.observing())
        yield profile


def _is_stream(loader: Any) -> bool:
    from torch.utils.data import DataLoader, IterableDataset

    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _for_stream(remedy: Remedy) -> Remedy:
    """Each worker of a DataLoader iterates the whole of a stream that does not ask which of them it is in."""
    if "workers" not in remedy.switch:
        return remedy
    caution = "; an IterableDataset has to share its samples out by get_worker_info(), else each worker gives them all"
    return replace(remedy, change=remedy.change + caution)


def _workers_of(loader: Any, tables: Any) -> WorkerWatch:
    said = getattr(loader, "num_workers", 0)
    num_workers = said if isinstance(said, int) else 0
    if tables is not None:
        return ProbedWorkers(tables, num_workers)
    if any(kind.__module__.startswith("flatout.") for kind in type(loader).__mro__):
        return FeedWorkers()
    if num_workers:
        logger.warning("The workers ran before the watch began, or are a data pipe's: what they do inside is not seen.")
    return NoWorkers(num_workers)
