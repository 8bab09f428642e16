"""The machinery of a started feed: does it fit, slots, workers, batches in order, and how well it keeps up."""

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from flatout.clock import Descriptors, StageTime, clock, machine, read_totals, worker_registry
from flatout.errors import ResourceError
from flatout.feed.batch import Batch, RowsBuffer, gather_rows
from flatout.feed.config import FeedConfig
from flatout.feed.plan import Plan, Step, choose_micro_batch, choose_slots
from flatout.feed.processes import Crew, Nobody, Processes, Threads
from flatout.feed.ring import Ring, RingSpec
from flatout.feed.source import ItemSource, Source
from flatout.feed.supervisor import Foreman, SampleError
from flatout.feed.worker import WorkOrders

logger = logging.getLogger(__name__)

# Will it fit? Asked before anything is started, answered with numbers.

FEWEST_SLOTS = 2
MEMORY_SHARE = 0.5
"""Of the free memory, what the slots may take: the model, the page cache and the workers need the rest."""
DESCRIPTORS_NEEDED = 16
"""Two pipes, three sockets and the ring, and a few for starting processes; every further lane needs a pipe."""


def fit_slots(spec: RingSpec, free_bytes: int) -> RingSpec:
    """The same ring, with fewer slots if memory demands it; ResourceError if even the fewest do not fit."""
    budget = int(free_bytes * MEMORY_SHARE)
    if spec.total_bytes <= budget:
        return spec
    fixed_bytes = spec.total_bytes - spec.num_slots * spec.slot_bytes
    num_slots = (budget - fixed_bytes) // spec.slot_bytes
    if num_slots < FEWEST_SLOTS:
        raise ResourceError(
            f"A batch of {spec.batch_size} takes {_mib(spec.slot_bytes)}, and at least {FEWEST_SLOTS} must fit into "
            f"half of the free memory ({_mib(free_bytes)} free). Use a smaller batch, or free memory."
        )
    logger.warning(
        "Memory: %d slots of %s would take more than half of the %s that are free; using %d slots.",
        spec.num_slots,
        _mib(spec.slot_bytes),
        _mib(free_bytes),
        num_slots,
    )
    return replace(spec, num_slots=num_slots)


def check_descriptors(limits: Descriptors, num_lanes: int = 1) -> None:
    """Refuse to start what would fail half-way for lack of descriptors."""
    needed = DESCRIPTORS_NEEDED + 2 * (num_lanes - 1)
    if limits.soft is not None and limits.soft - limits.open < needed:
        raise ResourceError(
            f"The feed needs {needed} file descriptors, but only {max(0, limits.soft - limits.open)} of "
            f"{limits.soft} are left. Raise the limit: ulimit -n {limits.open + 2 * needed} or more."
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


# How well is the feed keeping up? Numbers that cannot flatter.
#
# `data_time` is the time the consumer was blocked waiting for a batch, and nothing else; a rate is
# counted over wall time, waits included. The honest bound on what a better feed could gain is
# data_time / step time.

WORKER_STAGES = "draw", "read", "hand over"
"""What the feed itself marks in a worker; a source's own marks lie inside "read"."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What happened over an interval of wall time."""

    elapsed_s: float
    batches: int
    samples: int
    nbytes: int
    wait_s: float
    """Time the consumer was blocked."""

    ready_slots: float
    """Complete batches lying ready when the consumer asked, on average."""

    num_slots: int
    num_workers: int
    stages: Mapping[str, StageTime]
    """Time spent in each stage, summed over all workers."""

    @property
    def data_time_ms(self) -> float:
        """Time blocked per batch."""
        return 1e3 * self.wait_s / max(1, self.batches)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s

    @property
    def gain_at_most(self) -> float:
        """How much faster a perfect feed could make this: 0.25 is 25 %."""
        return self.wait_s / max(self.elapsed_s - self.wait_s, 1e-9)

    @property
    def readiness(self) -> float:
        """Share of the time in which the consumer was not kept waiting."""
        return 1 - self.wait_s / self.elapsed_s

    def stage_share(self, name: str) -> float:
        """Share of all workers' time spent in a stage."""
        total_ns = self.stages[name].total_ns
        return total_ns / 1e9 / (self.elapsed_s * max(1, self.num_workers))

    def line(self) -> str:
        """One line for a person: how fast, what the workers spend their time on, what the consumer waits for."""
        shares = {name: f"{name} {self.stage_share(name):.0%}" for name in self.stages}
        inside = ", ".join(text for name, text in shares.items() if name not in WORKER_STAGES)
        stages = ", ".join(shares[name] for name in WORKER_STAGES if name in shares)
        return (
            f"feed {self.samples_per_s:.0f} samples/s {self.nbytes / self.elapsed_s / 1e9:.2f} GB/s | "
            f"{self.num_workers} workers: {stages or 'idle'}{f' (inside read: {inside})' if inside else ''} | "
            f"{self.ready_slots:.1f} of {self.num_slots} slots ready | "
            f"data_time {self.data_time_ms:.1f} ms, at most {self.gain_at_most:.0%} faster with a perfect feed"
        )


class Meter:
    """Counts since it was made or last read."""

    def __init__(self, read_stages: Callable[[], Mapping[str, StageTime]], *, num_slots: int, num_workers: int) -> None:
        self._read_stages = read_stages
        self._num_slots = num_slots
        self._num_workers = num_workers
        self.restart()

    def count(self, *, samples: int, nbytes: int, wait_s: float, ready_slots: int) -> None:
        """One batch was handed out."""
        self._batches += 1
        self._samples += samples
        self._nbytes += nbytes
        self._wait_s += wait_s
        self._ready_slots += ready_slots

    def read(self) -> Reading:
        """Everything since the last reading; the next interval begins now."""
        stages = self._read_stages()
        reading = Reading(
            elapsed_s=max(time.perf_counter() - self._begin_s, 1e-9),
            batches=self._batches,
            samples=self._samples,
            nbytes=self._nbytes,
            wait_s=self._wait_s,
            ready_slots=self._ready_slots / max(1, self._batches),
            num_slots=self._num_slots,
            num_workers=self._num_workers,
            stages={name: _since(self._stages.get(name), time_) for name, time_ in stages.items()},
        )
        self.restart()
        return reading

    def restart(self) -> None:
        """Forget everything counted so far."""
        self._begin_s = time.perf_counter()
        self._stages = self._read_stages()
        self._batches = self._samples = self._nbytes = self._ready_slots = 0
        self._wait_s = 0.0


def sum_stages(tables: list[dict[str, StageTime]]) -> dict[str, StageTime]:
    """Stages of several workers added up."""
    total: dict[str, StageTime] = {}
    for table in tables:
        for name, (runs, total_ns) in table.items():
            before = total.get(name, StageTime(0, 0))
            total[name] = StageTime(before.runs + runs, before.total_ns + total_ns)
    return total


def _since(before: StageTime | None, now: StageTime) -> StageTime:
    return now if before is None else StageTime(now.runs - before.runs, now.total_ns - before.total_ns)


# Batches in order: steps are published ahead into free slots and taken when complete.


class Lease(NamedTuple):
    """A complete batch, and the slot it lies in until it is given back."""

    slot: int
    batch: Batch


class Stream:
    """The order of the slots: free -> published -> taken -> free."""

    def __init__(self, ring: Ring, foreman: Foreman, meter: Meter) -> None:
        self._ring = ring
        self._foreman = foreman
        self._meter = meter
        self._steps: Iterator[Step] = iter(())
        self._free = list(range(ring.spec.num_slots))
        self._flights: deque[tuple[int, Step]] = deque()
        self._leased: set[int] = set()
        self.buffers = [RowsBuffer() for _ in range(ring.spec.num_slots)]
        self.num_replaced = 0
        """How often a substitute was shown."""
        self.is_broken = False
        """An error or Ctrl-C came in between: nobody knows what is published, only new slots and workers help."""

    @property
    def next_step(self) -> Step | None:
        """The step that `take` returns next; None if nothing is published."""
        return self._flights[0][1] if self._flights else None

    def follow(self, steps: Iterator[Step]) -> None:
        """Deliver `steps` from now on. Whatever was published before, or is still leased, is void."""
        with self._all_or_broken():
            self._foreman.cancel()
            self._flights.clear()
            self._leased.clear()
            self._free = list(range(self._ring.spec.num_slots))
            self._steps = steps
            self._publish_ahead()

    def reclaim(self) -> None:
        """Go on with what is published, but take back the slots that an earlier pass still holds."""
        with self._all_or_broken():
            self._free += self._leased
            self._leased.clear()
            self._publish_ahead()

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        with self._all_or_broken():
            return bool(self._flights) and self._foreman.is_ready(self._flights[0][0])

    def take(self) -> Lease:
        """The next batch; blocks until it is complete. A slot must be free or in flight."""
        with self._all_or_broken():
            slot, step = self._flights[0]
            ready_slots = self._foreman.count_ready(slot for slot, _ in self._flights)
            begin_s = time.perf_counter()
            with clock.stage("feed.wait"):
                self._foreman.wait_until_ready(slot)
            wait_s = time.perf_counter() - begin_s
            self._flights.popleft()
            batch = self._batch(slot, step)
            self._leased.add(slot)
            self.num_replaced += int(self._ring.slots[slot].replaced[: len(batch)].sum())
            self._meter.count(samples=len(batch), nbytes=batch.nbytes, wait_s=wait_s, ready_slots=ready_slots)
            return Lease(slot, batch)

    def give_back(self, lease: Lease) -> None:
        """The batch is no longer needed; its slot is filled anew at once."""
        if lease.slot in self._leased:
            with self._all_or_broken():
                self._leased.remove(lease.slot)
                self._free.append(lease.slot)
                self._publish_ahead()

    @contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        try:
            yield
        except SampleError:
            # Void: a batch with a row that failed must not be taken by the next pass.
            self._flights.clear()
            raise
        except BaseException:
            self.is_broken = True
            raise

    def _publish_ahead(self) -> None:
        while self._free:
            step = next(self._steps, None)
            if step is None:
                return
            slot = self._free.pop()
            self._flights.append((slot, step))
            self._foreman.publish(slot, step)

    def _batch(self, slot_number: int, step: Step) -> Batch:
        slot, spec = self._ring.slots[slot_number], self._ring.spec
        rows = gather_rows(self._ring, slot_number, self.buffers[slot_number]) if spec.rows_fields else {}
        self._foreman.settle(slot_number)
        return Batch(
            epoch=step.epoch,
            step=step.step,
            num_valid=step.num_valid,
            indices=slot.shown[: slot.num_rows],
            positions=slot.positions[: slot.num_rows],
            fields={name: slot.field(name) for name in spec.fixed_fields} | rows,
            counts={name: slot.counts[name][: slot.num_rows] for name in spec.rows_fields},
        )


class FeedRuntime:
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
        worker_registry.announce(
            self, worker_registry.Crew(self.ring.stages, self.ring.timelines, num_workers, self.crew.pids)
        )
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
