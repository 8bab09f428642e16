"""Batches in order: steps are published ahead into free slots and taken when complete."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from flatout.feed.batch import Batch
from flatout.feed.foreman import Foreman, SampleError
from flatout.feed.meter import Meter
from flatout.feed.plan import Step
from flatout.feed.ring import Ring
from flatout.feed.rows import RowsBuffer, gather_rows
from flatout.profiler import clock


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
