"""Which part sets the speed? Three short runs, each of which leaves something out.

    compute    the step again and again on one batch that already lies where it is used
    transfer   the step on real batches that are kept in host memory, in turn
    input      batches taken from the feed, with nothing done to them

No advice is worth reading before these three numbers (and the real run's) are known.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from flatout.profiler.measurement import Limits

Step = Callable[[Any], object]
"""A training step on one batch, from wherever the loop finds it."""


class Budget(NamedTuple):
    """How long to look: at most so many steps or seconds per run, after a warm-up."""

    steps: int = 20
    warm_up: int = 2
    seconds: float = 10.0


DEFAULT_BUDGET = Budget()


def find_limits(
    step: Step,
    batches: Callable[[], Iterable[Any]],
    *,
    keep: Callable[[Any], Any] = lambda batch: batch,
    to_device: Callable[[Any], Any] = lambda batch: batch,
    budget: Budget = DEFAULT_BUDGET,
    kept_batches: int = 4,
) -> Limits:
    """Milliseconds per step of the three runs.

    `batches()` begins a pass over the real feed. `keep` copies a batch that is only borrowed; `to_device` puts it
    where `step` needs no further copy.
    """
    kept = [keep(batch) for batch in islice(batches(), kept_batches)]
    ready = to_device(kept[0])
    return Limits(
        compute_ms=median_ms(lambda: step(ready), budget),
        transfer_ms=_replayed_ms(step, kept, budget),
        input_ms=_input_ms(batches, budget),
    )


def median_ms(work: Callable[[], object], budget: Budget) -> float:
    """Median time of a call; everything queued on a device is part of it."""
    for _ in range(budget.warm_up):
        work()
    drain()
    began_s, durations_s = time.perf_counter(), []
    for _ in range(budget.steps):
        begin_s = time.perf_counter()
        work()
        drain()
        durations_s.append(time.perf_counter() - begin_s)
        if time.perf_counter() - began_s > budget.seconds:
            break
    return 1e3 * float(np.median(durations_s))


def drain() -> None:
    """Host-device wait, outside of any step: a measurement must not end before the work does."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _replayed_ms(step: Step, kept: Sequence[Any], budget: Budget) -> float:
    turn = cycle(kept)
    return median_ms(lambda: step(next(turn)), budget)


def _input_ms(batches: Callable[[], Iterable[Any]], budget: Budget) -> float:
    """Mean, not median: batches come in bursts, and only their rate counts. The first ones were made ahead of time."""
    passes = _endless(batches)
    for _ in range(budget.warm_up + 1):
        next(passes)
    begin_s, taken = time.perf_counter(), 0
    for _ in range(budget.steps):
        next(passes)
        taken += 1
        if time.perf_counter() - begin_s > budget.seconds:
            break
    return 1e3 * (time.perf_counter() - begin_s) / taken


def _endless(batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    while True:
        yield from batches()
