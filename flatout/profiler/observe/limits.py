"""Limits of a training, from three short runs that each leave something out: which part sets the speed?

    compute    the step again and again on one batch that is already where it is used
    transfer   the step on a few real batches that are kept in host memory, in turn
    input      batches taken from the feed, without using them

Measure these three, and the real run, before you follow any advice.
"""

import time
from collections.abc import Callable, Iterable
from itertools import chain, count, cycle, islice
from typing import Any, NamedTuple

import numpy as np

from flatout.profiler.measurement import Limits

Step = Callable[[Any], object]
"""A training step on one batch, including the copy to the device if the batch is not there yet."""


class Budget(NamedTuple):
    """Length of each run: a number of steps after a warm-up, or fewer if the seconds are used up."""

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
    """Measure the three limits, in milliseconds per step.

    `batches()` begins a pass over the real feed. `keep` copies a batch whose memory the feed will reuse; `to_device`
    moves it to where `step` needs no further copy.
    """
    kept = [keep(batch) for batch in islice(batches(), kept_batches)]
    ready, replayed = to_device(kept[0]), cycle(kept)
    return Limits(
        compute_ms=median_ms(lambda: step(ready), budget),
        transfer_ms=median_ms(lambda: step(next(replayed)), budget),
        input_ms=_input_ms(batches, budget),
    )


def median_ms(work: Callable[[], object], budget: Budget) -> float:
    """Median time of a call, until everything it queued on a device is done."""
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
    """Wait until the GPU, if any, has run everything queued: a measurement must not end before the work does."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _input_ms(batches: Callable[[], Iterable[Any]], budget: Budget) -> float:
    """Mean time per batch (batches come in bursts, so a median would mislead), without the first, which were made
    ahead of time."""
    endless = chain.from_iterable(batches() for _ in count())
    for _ in range(budget.warm_up + 1):
        next(endless)
    begin_s, taken = time.perf_counter(), 0
    for _ in range(budget.steps):
        next(endless)
        taken += 1
        if time.perf_counter() - begin_s > budget.seconds:
            break
    return 1e3 * (time.perf_counter() - begin_s) / taken
