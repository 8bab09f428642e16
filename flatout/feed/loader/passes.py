"""One pass over a dataset: batches in the sampler's order, each valid for as long as somebody holds it.

From the pieces of a batch to the batch, in the trainer: tensors over the body, containers from a pickle.
"""

import copy
import logging
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from flatout.clock import clock
from flatout.errors import ChildLostError, DataError
from flatout.feed.loader.batch_parts import (
    Form,
    Head,
    Hole,
    Leaf,
    Order,
    Piece,
    TensorHole,
    load_filled,
    place,
    raise_packed,
    row_value,
    view,
)
from flatout.feed.loader.runtime import Workshop

logger = logging.getLogger(__name__)

HEADS_AT_MOST = 256

Join = Callable[[list[Any]], Any]


class Assembled(NamedTuple):
    """A batch, and the arrays under those of its tensors that are views of the slot."""

    batch: Any
    arrays: list[np.ndarray]


class Assembler:
    """Puts batches together; knows the heads it has seen."""

    def __init__(self, join_fn: Join | None) -> None:
        self._join_fn = join_fn
        self._heads: dict[bytes, Head] = {}
        self._told: set[str] = set()

    def assemble(
        self, pieces: Sequence[Piece], body: np.ndarray, num_rows: int, micro_batch: int, *, private: bool
    ) -> Assembled:
        """The batch of `num_rows` samples that `pieces` describe; `private` tensors are copies, not views.

        Raises what a worker met, if it met something.
        """
        for piece in pieces:
            if piece.form == Form.ERROR:
                raise_packed(piece.content)
        heads = [self._head(piece) for piece in pieces]
        whole = pieces[0].form == Form.PART and self._join_fn is None
        leaves = next((head.leaves for head in heads if head.leaves), ())
        sheet = _Sheet(body, [leaf for leaf in leaves if leaf is not None], 1 if whole else num_rows, private)
        begins = range(0, max(1, num_rows), micro_batch)
        if whole:
            batch = _filled(pieces[0].content, lambda number: sheet.tensors[number][0], heads[0])
        elif pieces[0].form == Form.PART:
            batch = self._joined(pieces, heads, sheet, begins)
        elif all(piece.form == Form.ROWS for piece in pieces):
            batch = _collated(pieces, heads[0], sheet)
        else:
            batch = default_collate(_samples(pieces, heads, sheet, begins))
        return Assembled(batch, sheet.arrays)

    def _head(self, piece: Piece) -> Head:
        if piece.head not in self._heads:
            if len(self._heads) >= HEADS_AT_MOST:
                self._heads.clear()
            head: Head = pickle.loads(piece.head)
            self._heads[piece.head] = head
            for sentence in head.told:
                self._tell_once(sentence, logging.INFO if piece.form == Form.ROWS else logging.WARNING)
        return self._heads[piece.head]

    def _tell_once(self, sentence: str, level: int) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            logger.log(level, "Loader: %s.", sentence)

    def _joined(self, pieces: Sequence[Piece], heads: list[Head], sheet: "_Sheet", begins: range) -> Any:
        assert self._join_fn is not None

        def part(piece: Piece, head: Head, begin: int) -> Any:
            rows = slice(begin, begin + begins.step)
            return _filled(piece.content, lambda number: sheet.tensors[number][rows], head)

        return self._join_fn(list(map(part, pieces, heads, begins)))


class _Sheet:
    """The leaves of one batch as tensors [N, *shape]."""

    def __init__(self, body: np.ndarray, leaves: list[Leaf], num_rows: int, private: bool) -> None:
        placed = place(leaves, num_rows)
        views = [view(body, offset, leaf, num_rows) for leaf, offset in zip(leaves, placed.offsets, strict=True)]
        self.tensors = [tensor.clone() if private else tensor for tensor, _ in views]
        self.arrays = [] if private else [array for _, array in views]


def _filled(content: bytes, tensor_of: Callable[[int], Tensor], head: Head) -> Any:
    """A part made by collate_fn; what was an array there is one here, and what was one object is one."""
    made: dict[int, Any] = {}

    def fill(hole: TensorHole) -> Any:
        if hole.number not in made:
            leaf, tensor = head.leaves[hole.number], tensor_of(hole.number)
            tensor = tensor.permute(hole.back) if hole.back else tensor
            made[hole.number] = tensor.numpy() if leaf is not None and leaf.kind == "ndarray" else tensor
        return made[hole.number]

    return load_filled(content, fill)


def _collated(pieces: Sequence[Piece], head: Head, sheet: _Sheet) -> Any:
    """Rows under the default collate, all of them in place."""
    tensors = iter(sheet.tensors)
    in_place = {number: next(tensors) for number, leaf in enumerate(head.leaves) if leaf is not None}
    carried = [pickle.loads(piece.content) for piece in pieces] if len(in_place) < len(head.leaves) else []

    def fill(hole: Hole) -> Any:
        if hole.number in in_place:
            return in_place[hole.number]
        values = [value for parts in carried for value in parts[hole.number]]
        collated = default_collate(values)
        return tuple(values) if collated is values and hole.in_tuple else collated

    return load_filled(head.skeleton, fill)


def _samples(pieces: Sequence[Piece], heads: list[Head], sheet: _Sheet, begins: range) -> list[Any]:
    """The samples of a batch whose pieces are not alike, as they were before they were written in place."""
    samples: list[Any] = []
    for piece, head, begin in zip(pieces, heads, begins, strict=True):
        content = pickle.loads(piece.content)
        if piece.form == Form.SAMPLES:
            samples += content
        else:
            num_rows = min(begins.step, begins.stop - begin)
            samples += (_row(head, content, sheet, begin + row, row) for row in range(num_rows))
    return samples


def _row(head: Head, carried: dict[int, list[Any]], sheet: _Sheet, row: int, row_of_piece: int) -> Any:
    places = {number: place for place, number in enumerate(n for n, leaf in enumerate(head.leaves) if leaf is not None)}

    def fill(hole: Hole) -> Any:
        leaf = head.leaves[hole.number]
        if leaf is None:
            return carried[hole.number][row_of_piece]
        return row_value(leaf, sheet.tensors[places[hole.number]], row)

    return load_filled(head.skeleton, fill)


# The second half of a (collate_fn, join_fn) pair: from micro-batches to a batch, without copying where it can be.


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat along the first dimension; without a copy if the parts lie one after another already.

    Tensors with a row per sample do, if every micro-batch has the same dtype and row shape.
    """
    first, end = parts[0], int(parts[0].storage_offset())
    for part in parts:
        if not _continues(part, first, end):
            return torch.cat(list(parts))
        end += part.numel()
    num_rows = sum(len(part) for part in parts)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride())


def join_rows(parts: Sequence[Any]) -> Any:
    """Join collated micro-batches: tensors by `cat_rows`, lists of anything else end to end, through containers."""
    first = parts[0]
    if isinstance(first, Tensor):
        return cat_rows(parts)
    if isinstance(first, Mapping):
        joined = {key: join_rows([part[key] for part in parts]) for key in first}
        if isinstance(first, MutableMapping):
            clone = copy.copy(first)
            clone.update(joined)
            return clone
        return type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join_rows(each) for each in zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        if _holds_tensors(first):
            return type(first)(join_rows(each) for each in zip(*parts, strict=True))
        return type(first)(each for part in parts for each in part)
    raise TypeError(
        f"join_rows cannot join {type(first).__name__} objects: give Loader a join_fn of your own, "
        "which takes the list of what collate_fn made."
    )


def _continues(part: Tensor, first: Tensor, at: int) -> bool:
    return (
        part.is_contiguous()
        and part.dtype == first.dtype
        and part.shape[1:] == first.shape[1:]
        and part.storage_offset() == at
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and type(part) is Tensor
        and not part.requires_grad
    )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensors(each) for each in value)
    return isinstance(value, Tensor)


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
