"""Slots and workers of a running Loader.

Slots outlive workers: without persistent workers every epoch gets new ones, as in torch, but the
memory they fill, reserved and perhaps pinned, stays.
"""

import logging
import os
import pickle
import weakref
from typing import Any

import numpy as np

from flatout.clock import machine
from flatout.errors import ConfigError, ResourceError
from flatout.feed.batch import RowsBuffer, gather_rows
from flatout.feed.loader.batch_parts import Form, Order, Piece, encode
from flatout.feed.loader.slots import Areas, Holds, pin
from flatout.feed.loader.source import PIECE, DatasetSource, place_of
from flatout.feed.plan import Step
from flatout.feed.processes import Processes, unpicklable_attributes
from flatout.feed.ring import Ring, RingSpec
from flatout.feed.runtime import FEWEST_SLOTS, MEMORY_SHARE, check_descriptors
from flatout.feed.supervisor import Foreman
from flatout.feed.worker import WorkOrders

logger = logging.getLogger(__name__)

PROBE_SLOT = 0


class Slots:
    """The memory of a Loader."""

    def __init__(self, *, num_slots: int, num_pieces: int, num_workers: int, num_lanes: int, pinned: bool) -> None:
        check_descriptors(machine.descriptors(), num_lanes)
        spec = RingSpec(
            fields=DatasetSource.fields,
            batch_size=num_pieces,
            micro_batch=1,
            num_slots=num_slots,
            num_workers=num_workers,
            num_items=0,
            num_lanes=num_lanes,
        )
        self.ring = Ring.create(spec, shared_by_processes=True)
        self.areas = Areas.create(self.ring.arena, num_slots)
        self.holds = Holds(num_slots, pinned=pinned)
        self.usable = list(range(num_slots))
        """Slots that memory allows."""
        self._pinned = pinned
        self.body_bytes = 0
        """Room that every slot is given when it is next filled."""
        self.close = weakref.finalize(self, self.ring.close)

    def want_body(self, nbytes: int) -> None:
        """Batches take `nbytes`: from now on slots are given as much, as they come free."""
        if nbytes <= self.body_bytes:
            return
        self.body_bytes = nbytes
        affordable = int(machine.memory().free * MEMORY_SHARE) // nbytes
        if affordable < FEWEST_SLOTS:
            raise ResourceError(
                f"A batch takes {nbytes / 2**20:.0f} MiB, and at least {FEWEST_SLOTS} must fit into half of the free "
                f"memory ({machine.memory().free / 2**20:.0f} MiB free). Use a smaller batch, or free memory."
            )
        if affordable < len(self.usable):
            logger.warning(
                "Memory: %d slots of %.0f MiB would take more than half of what is free; using %d.",
                len(self.usable),
                nbytes / 2**20,
                affordable,
            )
            self.usable = self.usable[:affordable]

    def provide(self, slot: int) -> None:
        """Give a free slot a body as large as batches are."""
        if self.body_bytes and self.areas.provide_body(slot, self.body_bytes) and self._pinned:
            pin(self.areas.body(slot))


class Workshop:
    """Workers that fill slots, ended with it."""

    def __init__(self, slots: Slots, source: DatasetSource, *, start_method: str) -> None:
        self.slots = slots
        self.base_seed = source.base_seed
        self.num_passes = 0
        self.probing: set[int] = set()
        """Slots that a sample is read into only to learn its size."""
        self._source = source
        orders = WorkOrders(seed=0, substitute_errors=False)
        self.crew = Processes(slots.ring, source, orders, start_method=start_method)
        # No watchdog: how long a sample may take is the user's to say, with `timeout`.
        self.foreman = Foreman(slots.ring, self.crew, source, watchdog_s=0, bad_share=0)
        self.close = weakref.finalize(self, _close, self.crew, slots.ring, os.getpid())

    def call_up(self) -> None:
        """Have the workers at their places; blocks until they are."""
        try:
            self.crew.call_up()
        except ConfigError as error:
            raise _explained(error, self._source.dataset) from error.__cause__

    @property
    def num_lanes(self) -> int:
        return self.slots.ring.spec.num_lanes

    def publish(self, slot: int, order: Order, lane: int = 0) -> None:
        """Have a free slot filled as `order` says, by workers of `lane`."""
        self.slots.provide(slot)
        self.slots.areas.write_order(slot, encode(order))
        begins = [number * order.micro_batch for number in range(order.num_pieces)]
        samples = [order.keys[begin] if begin < len(order.keys) else 0 for begin in begins]
        indices = np.array([key if type(key) is int else order.position for key in samples], np.int64)
        places = np.array([place_of(slot, number) for number in range(order.num_pieces)], np.int64)
        self.foreman.publish(slot, Step(order.epoch, 0, indices, places, order.num_pieces, {}), lane)

    def probe(self, order: Order) -> None:
        """Have a sample read to learn how large batches are; see `take_in_probe`."""
        self.publish(PROBE_SLOT, order)
        self.probing = {PROBE_SLOT}

    def take_in_probe(self, margin: float) -> bool:
        """Make room as the probe suggests, times `margin`; False if it is still being read. Does not wait."""
        if self.probing and self.foreman.is_ready(PROBE_SLOT):
            self.probing.clear()
            (piece,) = self.collect(PROBE_SLOT)
            self.slots.want_body(int(piece.body_bytes * margin))
        return not self.probing

    def collect(self, slot: int) -> list[Piece]:
        """The pieces of a complete slot, in order."""
        ring = self.slots.ring
        rows = gather_rows(ring, slot, RowsBuffer())[PIECE]
        counts = ring.slots[slot].counts[PIECE][: ring.slots[slot].num_rows]
        self.foreman.settle(slot)
        ends = np.cumsum(counts)
        pieces = (pickle.loads(rows[end - count : end].tobytes()) for end, count in zip(ends, counts, strict=True))
        return [Piece(Form(form), *rest) for form, *rest in pieces]


def _close(crew: Processes, ring: Ring, owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked while the loader lived
        if ring.arena.fd >= 0:
            ring.withdraw_unclaimed()  # or workers would finish what nobody wants any more
        crew.close()


def _explained(error: ConfigError, dataset: Any) -> ConfigError:
    """The same, in the words of someone who has a dataset and not a source."""
    culprits = unpicklable_attributes(dataset)
    if not culprits:
        return error
    name = type(dataset).__name__
    return ConfigError(
        f"The dataset cannot be sent to worker processes: {' and '.join(f'{name}.{each}' for each in culprits)} cannot "
        f"be pickled ({error.__cause__}). Open such things on first use in __getitem__, or use "
        "multiprocessing_context='fork'."
    )
