"""The machinery of a started feed: slots, workers, and those who look after them."""

import os
import weakref
from collections.abc import Callable
from functools import partial

from flatout.feed.crew import Crew, Nobody, Threads
from flatout.feed.foreman import Foreman
from flatout.feed.knobs import FeedConfig
from flatout.feed.meter import Meter, sum_stages
from flatout.feed.plan import Plan, choose_micro_batch, choose_slots
from flatout.feed.preflight import check_descriptors, fit_slots
from flatout.feed.processes import Processes
from flatout.feed.ring import Ring, RingSpec
from flatout.feed.source import ItemSource, Source
from flatout.feed.stream import Stream
from flatout.feed.worker import WorkOrders
from flatout.profiler import crews, machine
from flatout.profiler.clock import StageTime, read_totals


class Works:
    """Slots and workers of a started feed, ended with it."""

    def __init__(self, source: Source, plan: Plan, config: FeedConfig, num_workers: int) -> None:
        check_descriptors(machine.descriptors())
        spec = fit_slots(_ring_spec(source, plan, config, num_workers), machine.memory().free)
        self.ring = Ring.create(spec, shared_by_processes=config.backend == "process" and num_workers > 0)
        orders = WorkOrders(seed=plan.seed, substitute_errors=config.on_error == "substitute")
        self.crew = _hire(self.ring, source, orders, config, num_workers)
        self.foreman = Foreman(self.ring, self.crew, source, watchdog_s=config.watchdog_s, bad_share=config.bad_share)
        self.meter = Meter(partial(_read_stages, self.ring), num_slots=spec.num_slots, num_workers=num_workers)
        self.stream = Stream(self.ring, self.foreman, self.meter)
        self.before_close: list[Callable[[], None]] = []
        crews.announce(self, crews.Crew(self.ring.stages, self.ring.timelines, num_workers, self.crew.pids))
        # Also when the feed is dropped without close(), or the interpreter ends.
        self.close = weakref.finalize(self, _close, self.crew, self.ring, self.before_close, os.getpid())


def _read_stages(ring: Ring) -> dict[str, StageTime]:
    return sum_stages([read_totals(table) for table in ring.stages])


def _close(crew: Crew, ring: Ring, before_close: list[Callable[[], None]], owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked while the feed lived
        for callback in before_close:
            callback()
        ring.withdraw_unclaimed()  # or workers would finish what nobody wants any more
        crew.close()
        ring.close()


def _hire(ring: Ring, source: Source, orders: WorkOrders, config: FeedConfig, num_workers: int) -> Crew:
    if num_workers == 0:
        return Nobody(ring, source, orders)
    if config.backend == "thread":
        return Threads(ring, source, orders)
    return Processes(ring, source, orders, start_method=config.start_method)


def _ring_spec(source: Source, plan: Plan, config: FeedConfig, num_workers: int) -> RingSpec:
    prefetched = None if config.prefetch_factor is None else config.prefetch_factor + 2
    return RingSpec(
        fields=dict(source.fields),
        batch_size=plan.batch_size,
        micro_batch=min(plan.batch_size, config.micro_batch or choose_micro_batch(plan.batch_size, num_workers)),
        num_slots=config.slots or prefetched or choose_slots(plan.batch_size, num_workers),
        num_workers=max(1, num_workers),
        num_items=source.num_items if isinstance(source, ItemSource) else len(source),
    )
