"""The runtime of a started feed: memory checks, slots, workers, batches in order, and a throughput meter."""

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
from flatout.feed.processes import InlineBackend, ProcessBackend, ThreadBackend, WorkerBackend
from flatout.feed.ring import Ring, RingSpec
from flatout.feed.source import Source, num_items_of
from flatout.feed.supervisor import SampleError, Supervisor
from flatout.feed.worker import WorkerSettings

logger = logging.getLogger(__name__)

# Resource checks, made before anything is started

MIN_SLOTS = 2
MEMORY_SHARE = 0.5
"""Share of the free memory that slots may take: the model, the page cache and the workers need the rest."""
DESCRIPTORS_NEEDED = 16
"""Two pipes, three sockets and the ring, and a few for starting processes; every additional lane needs a pipe."""


def slots_that_fit(num_slots: int, slot_bytes: int, *, other_bytes: int = 0, batch: str = "batch") -> int:
    """As many slots as fit into half of the free memory, beside `other_bytes`, and at most `num_slots`.

    A warning if they are fewer, ResourceError if not even MIN_SLOTS fit; `batch` names in it what a slot holds.
    """
    free_bytes = machine.memory().free
    num_fitting = (int(free_bytes * MEMORY_SHARE) - other_bytes) // slot_bytes
    if num_fitting >= num_slots:
        return num_slots
    if num_fitting < MIN_SLOTS:
        raise ResourceError(
            f"A {batch} takes {_mib(slot_bytes)}, and at least {MIN_SLOTS} batches must fit into half of the free "
            f"memory ({_mib(free_bytes)} free). Use a smaller batch, or free some memory."
        )
    logger.warning(
        "Memory: %d slots of %s would take more than half of the %s of free memory; using %d slots.",
        num_slots,
        _mib(slot_bytes),
        _mib(free_bytes),
        num_fitting,
    )
    return num_fitting


def check_descriptors(limits: Descriptors, num_lanes: int = 1) -> None:
    """Raise ResourceError if the process does not have enough file descriptors left to start a feed."""
    needed = DESCRIPTORS_NEEDED + 2 * (num_lanes - 1)
    if limits.soft is not None and limits.soft - limits.open < needed:
        raise ResourceError(
            f"The feed needs {needed} file descriptors, but only {max(0, limits.soft - limits.open)} of "
            f"{limits.soft} are left. Raise the limit: ulimit -n {limits.open + 2 * needed} or more."
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


# Throughput meter.
#
# `data_time` is the time for which the consumer was blocked waiting for a batch, and nothing else; rates are measured
# over wall time, waits included. The upper bound of what a faster feed could gain is
# data_time / (step time - data_time).

WORKER_STAGES = "draw", "read", "hand over"
"""Stages that the feed itself records in a worker; a source's own stages are nested in "read"."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Measurements over an interval of wall time."""

    elapsed_s: float
    batches: int
    samples: int
    nbytes: int
    wait_s: float
    """Time for which the consumer was blocked."""

    ready_slots: float
    """Average number of complete batches at the moments when the consumer requested one."""

    num_slots: int
    num_workers: int
    stages: Mapping[str, StageTime]
    """Time per stage, summed over all workers."""

    @property
    def data_time_ms(self) -> float:
        """Time blocked per batch, in milliseconds."""
        return 1e3 * self.wait_s / max(1, self.batches)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s

    @property
    def gain_at_most(self) -> float:
        """How much faster a perfect feed could make the loop: 0.25 means 25 %."""
        return self.wait_s / max(self.elapsed_s - self.wait_s, 1e-9)

    @property
    def readiness(self) -> float:
        """Share of the time in which the consumer did not wait."""
        return 1 - self.wait_s / self.elapsed_s

    def stage_share(self, name: str) -> float:
        """Share of all workers' time spent in a stage."""
        total_ns = self.stages[name].total_ns
        return total_ns / 1e9 / (self.elapsed_s * max(1, self.num_workers))

    def line(self) -> str:
        """Summary in one line: throughput, what the workers spend their time on, how long the consumer waits."""
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
    """Counts batches, samples, bytes and waits since it was created or last read."""

    def __init__(self, read_stages: Callable[[], Mapping[str, StageTime]], *, num_slots: int, num_workers: int) -> None:
        self._read_stages = read_stages
        self._num_slots = num_slots
        self._num_workers = num_workers
        self.restart()

    def count(self, *, samples: int, nbytes: int, wait_s: float, ready_slots: int) -> None:
        """Count one batch that was handed out."""
        self._batches += 1
        self._samples += samples
        self._nbytes += nbytes
        self._wait_s += wait_s
        self._ready_slots += ready_slots

    def read(self) -> Reading:
        """Measurements since the last reading; starts the next interval."""
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
        """Reset all counts and start a new interval."""
        self._begin_s = time.perf_counter()
        self._stages = self._read_stages()
        self._batches = self._samples = self._nbytes = self._ready_slots = 0
        self._wait_s = 0.0


def _since(before: StageTime | None, now: StageTime) -> StageTime:
    return now if before is None else StageTime(now.runs - before.runs, now.total_ns - before.total_ns)


# Batches in order: steps are published ahead into free slots, and taken when they are complete


class Lease(NamedTuple):
    """A complete batch and the slot that it occupies until it is given back."""

    slot: int
    batch: Batch


class Stream:
    """Moves slots through their cycle, in step order: free -> published -> taken -> free."""

    def __init__(self, ring: Ring, supervisor: Supervisor, meter: Meter) -> None:
        self._ring = ring
        self._supervisor = supervisor
        self._meter = meter
        self._steps: Iterator[Step] = iter(())
        self._free = list(range(ring.spec.num_slots))
        self._in_flight: deque[tuple[int, Step]] = deque()
        self._leased: set[int] = set()
        self.buffers = [RowsBuffer() for _ in range(ring.spec.num_slots)]
        self.num_replaced = 0
        """Number of substitutes shown."""
        self.is_broken = False
        """Whether an error or Ctrl-C left the queue in an unknown state: slots and workers must be created again."""

    @property
    def next_step(self) -> Step | None:
        """The step that the next `take` returns; None if nothing is published."""
        return self._in_flight[0][1] if self._in_flight else None

    def follow(self, steps: Iterator[Step]) -> None:
        """Yield `steps` from now on. Everything published before, or still leased, becomes invalid."""
        with self._broken_on_error():
            self._supervisor.cancel()
            self._in_flight.clear()
            self._leased.clear()
            self._free = list(range(self._ring.spec.num_slots))
            self._steps = steps
            self._publish_ahead()

    def reclaim(self) -> None:
        """Continue with what is published, but take back the slots that an earlier pass still holds."""
        with self._broken_on_error():
            self._free += self._leased
            self._leased.clear()
            self._publish_ahead()

    def is_ready(self) -> bool:
        """Whether `take` would return without waiting."""
        with self._broken_on_error():
            return bool(self._in_flight) and self._supervisor.is_ready(self._in_flight[0][0])

    def take(self) -> Lease:
        """The next batch; blocks until it is complete. A slot must be free or in flight."""
        with self._broken_on_error():
            slot, step = self._in_flight[0]
            ready_slots = self._supervisor.count_ready(slot for slot, _ in self._in_flight)
            begin_s = time.perf_counter()
            with clock.stage("feed.wait"):
                self._supervisor.wait_until_ready(slot)
            wait_s = time.perf_counter() - begin_s
            self._in_flight.popleft()
            batch = self._batch(slot, step)
            self._leased.add(slot)
            self.num_replaced += int(self._ring.slots[slot].replaced[: len(batch)].sum())
            self._meter.count(samples=len(batch), nbytes=batch.nbytes, wait_s=wait_s, ready_slots=ready_slots)
            return Lease(slot, batch)

    def give_back(self, lease: Lease) -> None:
        """Return a batch that is no longer needed; its slot is published again immediately."""
        if lease.slot in self._leased:
            with self._broken_on_error():
                self._leased.remove(lease.slot)
                self._free.append(lease.slot)
                self._publish_ahead()

    @contextmanager
    def _broken_on_error(self) -> Iterator[None]:
        try:
            yield
        except SampleError:
            # The next pass must not take a batch in which a row failed.
            self._in_flight.clear()
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
            self._in_flight.append((slot, step))
            self._supervisor.publish(slot, step)

    def _batch(self, slot_number: int, step: Step) -> Batch:
        slot, spec = self._ring.slots[slot_number], self._ring.spec
        rows = gather_rows(self._ring, slot_number, self.buffers[slot_number]) if spec.rows_fields else {}
        self._supervisor.settle(slot_number)
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
    """Slots and workers of a started feed; closed when it is dropped."""

    def __init__(self, source: Source, plan: Plan, config: FeedConfig, num_workers: int) -> None:
        check_descriptors(machine.descriptors())
        spec = _ring_spec(source, plan, config, num_workers)
        batch = f"batch of {plan.batch_size}"
        num_slots = slots_that_fit(spec.num_slots, spec.slot_bytes, other_bytes=spec.control_bytes, batch=batch)
        spec = replace(spec, num_slots=num_slots)
        self.ring = Ring.create(spec, shared_by_processes=config.backend == "process" and num_workers > 0)
        settings = WorkerSettings(seed=plan.seed, substitute_errors=config.on_error == "substitute")
        self.backend = _make_backend(self.ring, source, settings, config, num_workers)
        self.supervisor = Supervisor(
            self.ring, self.backend, source, watchdog_s=config.watchdog_s, bad_share=config.bad_share
        )
        self.meter = Meter(partial(read_totals, self.ring.stages), num_slots=spec.num_slots, num_workers=num_workers)
        self.stream = Stream(self.ring, self.supervisor, self.meter)
        self.before_close: list[Callable[[], None]] = []
        worker_registry.announce(
            self, worker_registry.WorkerGroup(self.ring.stages, self.ring.timelines, num_workers, self.backend.pids)
        )
        # Also runs when the feed is dropped without close(), and when the interpreter exits.
        self.close = weakref.finalize(self, _close, self.backend, self.ring, self.before_close, os.getpid())


def _close(backend: WorkerBackend, ring: Ring, before_close: list[Callable[[], None]], owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked while the feed was open
        for callback in before_close:
            callback()
        ring.withdraw_unclaimed()  # otherwise workers would finish tasks that are no longer needed
        backend.close()
        ring.close()


def _make_backend(
    ring: Ring, source: Source, settings: WorkerSettings, config: FeedConfig, num_workers: int
) -> WorkerBackend:
    if num_workers == 0:
        return InlineBackend(ring, source, settings)
    if config.backend == "thread":
        return ThreadBackend(ring, source, settings)
    return ProcessBackend(ring, source, settings, start_method=config.start_method)


def _ring_spec(source: Source, plan: Plan, config: FeedConfig, num_workers: int) -> RingSpec:
    prefetched = None if config.prefetch_factor is None else config.prefetch_factor + 2
    return RingSpec(
        fields=dict(source.fields),
        batch_size=plan.batch_size,
        micro_batch=min(plan.batch_size, config.micro_batch or choose_micro_batch(plan.batch_size, num_workers)),
        num_slots=config.slots or prefetched or choose_slots(plan.batch_size, num_workers),
        num_workers=max(1, num_workers),
        num_items=num_items_of(source),
    )
