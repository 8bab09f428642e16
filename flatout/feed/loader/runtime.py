"""Slots and workers of a running Loader.

Slots outlive workers: without persistent workers, every epoch starts new workers, as in torch, but the reserved and
perhaps pinned memory is kept.
"""

import os
import pickle
import weakref

import numpy as np

from flatout.clock import machine
from flatout.errors import ConfigError
from flatout.feed.batch import RowsBuffer, gather_rows
from flatout.feed.loader.batch_parts import BatchPart, BatchRequest, PartKind
from flatout.feed.loader.slots import SlotBuffers, SlotRefs, pin
from flatout.feed.loader.source import PART, DatasetSource, encode_position
from flatout.feed.plan import Step
from flatout.feed.processes import ProcessBackend, unpicklable_attributes
from flatout.feed.ring import Ring, RingSpec
from flatout.feed.runtime import check_descriptors, slots_that_fit
from flatout.feed.supervisor import Supervisor
from flatout.feed.worker import WorkerSettings

PROBE_SLOT = 0


class Slots:
    """The shared memory of a Loader."""

    def __init__(self, *, num_slots: int, num_parts: int, num_workers: int, num_lanes: int, pinned: bool) -> None:
        check_descriptors(machine.descriptors(), num_lanes)
        spec = RingSpec(
            fields=DatasetSource.fields,
            batch_size=num_parts,
            micro_batch=1,
            num_slots=num_slots,
            num_workers=num_workers,
            num_items=0,
            num_lanes=num_lanes,
        )
        self.ring = Ring.create(spec, shared_by_processes=True)
        self.buffers = SlotBuffers.create(self.ring.arena, num_slots)
        self.refs = SlotRefs(num_slots, pinned=pinned)
        self.usable = list(range(num_slots))
        """Slots that may be used, given the free memory."""
        self._pinned = pinned
        self.body_bytes = 0
        """Size of the body that each slot gets when it is filled next."""
        self.close = weakref.finalize(self, self.ring.close)

    def require_body(self, nbytes: int) -> None:
        """Give each slot a body of at least `nbytes` when it is filled next; raises ResourceError without memory."""
        if nbytes <= self.body_bytes:
            return
        self.body_bytes = nbytes
        self.usable = self.usable[: slots_that_fit(len(self.usable), nbytes)]

    def prepare(self, slot: int) -> None:
        """Give a free slot a body of the current size."""
        if self.body_bytes and self.buffers.ensure_body(slot, self.body_bytes) and self._pinned:
            pin(self.buffers.body(slot))


class LoaderRuntime:
    """Workers that fill slots; stopped when it is dropped."""

    def __init__(self, slots: Slots, source: DatasetSource, *, start_method: str) -> None:
        self.slots = slots
        self.base_seed = source.base_seed
        self.num_passes = 0
        self.probing: set[int] = set()
        """Slots with a sample that is read only to find out its size."""
        self._source = source
        settings = WorkerSettings(seed=0, substitute_errors=False)
        self.backend = ProcessBackend(slots.ring, source, settings, start_method=start_method)
        # No watchdog: the user sets how long a batch may take, with `timeout`.
        self.supervisor = Supervisor(slots.ring, self.backend, source, watchdog_s=0, bad_share=0)
        self.close = weakref.finalize(self, _close, self.backend, slots.ring, os.getpid())

    def start_workers(self) -> None:
        """Start the workers; blocks until they run."""
        try:
            self.backend.start_workers()
        except ConfigError as error:
            raise _explained(error, self._source) from error.__cause__

    def publish(self, slot: int, request: BatchRequest, lane: int = 0) -> None:
        """Have workers of `lane` fill a free slot as requested."""
        self.slots.prepare(slot)
        self.slots.buffers.write_request(slot, pickle.dumps(tuple(request)))
        begins = [number * request.micro_batch for number in range(request.num_parts)]
        samples = [request.keys[begin] if begin < len(request.keys) else 0 for begin in begins]
        indices = np.array([key if type(key) is int else request.position for key in samples], np.int64)
        places = np.array([encode_position(slot, number) for number in range(request.num_parts)], np.int64)
        self.supervisor.publish(slot, Step(request.epoch, 0, indices, places, request.num_parts, {}), lane)

    def probe(self, request: BatchRequest) -> None:
        """Have a sample read to find out how large batches are; see `poll_probe`."""
        self.publish(PROBE_SLOT, request)
        self.probing = {PROBE_SLOT}

    def poll_probe(self, margin: float) -> bool:
        """If the probe has been read, make room for batches of its size times `margin`; False if not. Does not wait."""
        if self.probing and self.supervisor.is_ready(PROBE_SLOT):
            self.probing.clear()
            (part,) = self.collect(PROBE_SLOT)
            self.slots.require_body(int(part.body_bytes * margin))
        return not self.probing

    def collect(self, slot: int) -> list[BatchPart]:
        """The parts of a complete slot, in order."""
        ring = self.slots.ring
        rows = gather_rows(ring, slot, RowsBuffer())[PART]
        counts = ring.slots[slot].counts[PART][: ring.slots[slot].num_rows]
        self.supervisor.settle(slot)
        ends = np.cumsum(counts)
        parts = (pickle.loads(rows[end - count : end].tobytes()) for end, count in zip(ends, counts, strict=True))
        return [BatchPart(PartKind(kind), *rest) for kind, *rest in parts]


def _close(backend: ProcessBackend, ring: Ring, owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked while the loader was open
        if ring.arena.fd >= 0:
            ring.withdraw_unclaimed()  # otherwise workers would finish tasks that are no longer needed
        backend.close()


def _explained(error: ConfigError, source: DatasetSource) -> ConfigError:
    """The same error, in terms of the user's dataset and functions instead of a source."""
    name = type(source.dataset).__name__
    if culprits := [f"{name}.{each}" for each in unpicklable_attributes(source.dataset)]:
        what, advice = "dataset", "Open files and handles on first use in __getitem__"
    elif culprits := unpicklable_attributes(source):
        what, advice = "Loader", "Define functions and classes at the top level of a module"
    else:
        return error
    return ConfigError(
        f"The {what} cannot be sent to worker processes: {' and '.join(culprits)} cannot be pickled "
        f"({error.__cause__}). {advice}, or use multiprocessing_context='fork'."
    )
