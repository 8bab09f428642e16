"""One pass over a dataset: batches in the sampler's order, each valid for as long as somebody holds it."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from flatout.clock import clock
from flatout.errors import ChildLostError, DataError
from flatout.feed.loader.assemble import Assembler
from flatout.feed.loader.batch_parts import Order, Piece
from flatout.feed.loader.runtime import Workshop

POLL_S = 0.002
PROBE_WAIT_S = 10.0
"""Longer than nearly every sample takes: what is read while there is no room for it may have to be read twice."""
FREE_SLOTS = 2
"""Slots that users may not hold: one is being filled while the next lies ready."""


class Pass:
    """Iterator over the batches of an epoch.

        sampler --order--> free slot --workers--> pieces --assemble--> batch

    A batch's tensors are views of its slot, which is filled anew when the last of them is gone. To a
    user who keeps many batches copies are handed out instead.
    """

    def __init__(
        self,
        workshop: Workshop,
        orders: Iterator[Order],
        assembler: Assembler,
        *,
        length: Callable[[], int],
        timeout_s: float,
        finish_batch: Callable[[Any], Any],
        learn: Callable[[list[Piece]], None],
        at_end: Callable[[Workshop, bool], None],
    ) -> None:
        self._workshop = workshop
        self._orders = orders
        self._assembler = assembler
        self._length = length
        self._timeout_s = timeout_s
        self._finish_batch = finish_batch
        self._learn = learn
        self._at_end = at_end
        self._flights: deque[tuple[int, Order]] = deque()
        self._num_published = 0
        self.has_ended = False
        self._publish_ahead()

    def __iter__(self) -> "Pass":
        return self

    def __len__(self) -> int:
        return self._length()

    def __next__(self) -> Any:
        if self.has_ended:
            raise StopIteration
        try:
            self._publish_ahead()
            if not self._flights:
                self._end(in_peace=True)
                raise StopIteration
            slot, order = self._flights[0]
            self._wait_for(slot)
            self._flights.popleft()
            pieces = self._workshop.collect(slot)
        except (StopIteration, TimeoutError):
            raise
        except DataError as error:
            self._end(in_peace=False)
            raise _deadly_sample(error) from error
        except BaseException:
            self._end(in_peace=False)  # nobody knows what is published: only new slots and workers help
            raise
        self._workshop.slots.want_body(max(piece.body_bytes for piece in pieces))
        self._learn(pieces)
        batch = self._hand_out(slot, order, pieces)
        self._publish_ahead()
        return batch

    def _hand_out(self, slot: int, order: Order, pieces: list[Piece]) -> Any:
        slots = self._workshop.slots
        private = slots.holds.num_held + 1 + FREE_SLOTS > len(slots.usable)
        body = slots.areas.body(slot)
        batch, arrays = self._assembler.assemble(pieces, body, len(order.keys), order.micro_batch, private=private)
        slots.holds.hold(slot, arrays)
        return self._finish_batch(batch)

    def _publish_ahead(self) -> None:
        self._workshop.take_in_probe(margin=1)
        slots, busy = self._workshop.slots, {slot for slot, _ in self._flights} | self._workshop.probing
        for slot in slots.usable:
            if slot not in busy and slots.holds.is_free(slot):
                order = next(self._orders, None)
                if order is None:
                    return
                self._flights.append((slot, order))
                self._workshop.publish(slot, order, lane=self._num_published % self._workshop.num_lanes)
                self._num_published += 1

    def _wait_for(self, slot: int) -> None:
        with clock.stage("feed.wait"):
            if not self._timeout_s:
                self._workshop.foreman.wait_until_ready(slot)
                return
            deadline = time.monotonic() + self._timeout_s
            while not self._workshop.foreman.is_ready(slot):
                if time.monotonic() > deadline:
                    raise BatchTimeoutError(
                        # The first words are torch's: there are programs that look for them.
                        f"DataLoader timed out after {self._timeout_s:g} seconds without a batch. A larger timeout, or "
                        "0 for none, waits longer; num_workers=0 shows where the dataset spends its time."
                    )
                time.sleep(POLL_S)
            self._workshop.foreman.wait_until_ready(slot)  # raises what went wrong

    def _end(self, *, in_peace: bool) -> None:
        self.has_ended = True
        self._at_end(self._workshop, in_peace)


class BatchTimeoutError(RuntimeError, TimeoutError):
    """A batch did not come in time; asking again waits again."""


def learn_size(workshop: Workshop, probe: Order, margin: float) -> None:
    """Read one sample to see how large batches are; its errors come with its batch.

    Waits `PROBE_WAIT_S` at most: the sample may be waiting for others, which other workers are to read. Batches are
    carried by pickle until it is there.
    """
    workshop.probe(probe)
    deadline = time.monotonic() + PROBE_WAIT_S
    try:
        while not workshop.take_in_probe(margin) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    except DataError as error:
        raise _deadly_sample(error) from error


def _deadly_sample(error: DataError) -> ChildLostError:
    return ChildLostError(f"A sample ends the workers that read it. {error}")
