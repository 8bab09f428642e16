"""One pass over a dataset: batches in the sampler's order, each valid for as long as it is referenced.

A batch is assembled from its parts in the trainer: tensors are views of the slot's body, containers come from a pickle.

Dimension key:  N samples of the batch
"""

import copy
import logging
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from flatout.clock import clock
from flatout.errors import ChildLostError, DataError, FlatoutError
from flatout.feed.loader.batch_parts import (
    BatchPart,
    BatchRequest,
    Hole,
    PartHead,
    PartKind,
    TensorHole,
    load_filled,
    raise_packed,
    row_value,
    views,
)
from flatout.feed.loader.runtime import LoaderRuntime
from flatout.feed.supervisor import Supervisor

logger = logging.getLogger(__name__)

MAX_HEADS = 256

Join = Callable[[list[Any]], Any]
Tensors = Mapping[int, Tensor]
"""Number of a leaf -> the tensor [N, *shape] of the batch."""


# From parts to a batch


class Assembler:
    """Assembles batches from their parts; caches the heads of parts."""

    def __init__(self, join_fn: Join | None) -> None:
        self._join_fn = join_fn
        self._heads: dict[bytes, PartHead] = {}
        self._logged: set[str] = set()

    def assemble(
        self, parts: Sequence[BatchPart], body: np.ndarray, num_rows: int, micro_batch: int, *, copy_tensors: bool
    ) -> tuple[Any, list[np.ndarray]]:
        """The batch of `num_rows` samples made of `parts`, and the arrays behind those of its tensors that are views of
        the slot; with `copy_tensors`, these are copies.

        Raises the exception of a part that failed in its worker.
        """
        for part in parts:
            if part.kind == PartKind.ERROR:
                raise_packed(part.content)
        heads = [self._head(part) for part in parts]
        whole = parts[0].kind == PartKind.COLLATED and self._join_fn is None
        # All parts that have leaves have the same ones.
        leaves = next((head.leaves for head in heads if head.leaves), ())
        in_place = {number: leaf for number, leaf in enumerate(leaves) if leaf is not None}
        in_body, arrays = views(body, list(in_place.values()), 1 if whole else num_rows)
        if copy_tensors:
            in_body, arrays = [tensor.clone() for tensor in in_body], []
        tensors = dict(zip(in_place, in_body, strict=True))
        begins = range(0, max(1, num_rows), micro_batch)
        if whole:
            batch = _filled(parts[0].content, lambda number: tensors[number][0], heads[0])
        elif parts[0].kind == PartKind.COLLATED:
            batch = self._joined(parts, heads, tensors, begins)
        elif all(part.kind == PartKind.ROWS for part in parts):
            batch = _collated(parts, heads[0], tensors)
        else:
            batch = default_collate(_samples(parts, heads, tensors, begins))
        return batch, arrays

    def _head(self, part: BatchPart) -> PartHead:
        if part.head not in self._heads:
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
            head: PartHead = pickle.loads(part.head)
            self._heads[part.head] = head
            for sentence in head.messages:
                self._log_once(sentence, logging.INFO if part.kind == PartKind.ROWS else logging.WARNING)
        return self._heads[part.head]

    def _log_once(self, sentence: str, level: int) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            logger.log(level, "Loader: %s.", sentence)

    def _joined(self, parts: Sequence[BatchPart], heads: list[PartHead], tensors: Tensors, begins: range) -> Any:
        assert self._join_fn is not None

        def micro_batch(part: BatchPart, head: PartHead, begin: int) -> Any:
            rows = slice(begin, begin + begins.step)
            return _filled(part.content, lambda number: tensors[number][rows], head)

        return self._join_fn(list(map(micro_batch, parts, heads, begins)))


def _filled(content: bytes, tensor_of: Callable[[int], Tensor], head: PartHead) -> Any:
    """The result of collate_fn as it was in the worker: arrays are arrays, and shared objects are shared."""
    made: dict[int, Any] = {}

    def fill(hole: TensorHole) -> Any:
        if hole.number not in made:
            leaf, tensor = head.leaves[hole.number], tensor_of(hole.number)
            tensor = tensor.permute(hole.back) if hole.back else tensor
            made[hole.number] = tensor.numpy() if leaf is not None and leaf.kind == "ndarray" else tensor
        return made[hole.number]

    return load_filled(content, fill)


def _collated(parts: Sequence[BatchPart], head: PartHead, tensors: Tensors) -> Any:
    """A batch under the default collate whose rows are all in place."""
    pickled_values = [pickle.loads(part.content) for part in parts] if len(tensors) < len(head.leaves) else []

    def fill(hole: Hole) -> Any:
        if hole.number in tensors:
            return tensors[hole.number]
        values = [value for by_number in pickled_values for value in by_number[hole.number]]
        collated = default_collate(values)
        return tuple(values) if collated is values and hole.in_tuple else collated

    return load_filled(head.skeleton, fill)


def _samples(parts: Sequence[BatchPart], heads: list[PartHead], tensors: Tensors, begins: range) -> list[Any]:
    """The original samples of a batch whose parts differ in structure."""
    samples: list[Any] = []
    for part, head, begin in zip(parts, heads, begins, strict=True):
        content = pickle.loads(part.content)
        if part.kind == PartKind.SAMPLES:
            samples += content
        else:
            num_rows = min(begins.step, begins.stop - begin)
            samples += (_row(head, content, tensors, begin + row, row) for row in range(num_rows))
    return samples


def _row(head: PartHead, pickled_values: dict[int, list[Any]], tensors: Tensors, row: int, row_of_part: int) -> Any:
    def fill(hole: Hole) -> Any:
        leaf = head.leaves[hole.number]
        if leaf is None:
            return pickled_values[hole.number][row_of_part]
        return row_value(leaf, tensors[hole.number], row)

    return load_filled(head.skeleton, fill)


# For join_fn: from collated micro-batches to a batch, without copying where possible


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat along the first dimension; without a copy if the parts already follow each other in memory.

    Tensors with one row per sample do, if all micro-batches have the same dtype and row shape.
    """
    first, end = parts[0], int(parts[0].storage_offset())
    for part in parts:
        if not _continues(part, first, end):
            return torch.cat(list(parts))
        end += part.numel()
    num_rows = sum(len(part) for part in parts)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride())


def join_rows(parts: Sequence[Any]) -> Any:
    """Join collated micro-batches: tensors by `cat_rows`, lists of other objects by concatenation; recursively."""
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
        f"join_rows cannot join {type(first).__name__} objects: write your own join_fn, "
        "which gets the list of what collate_fn returned."
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


# One pass

POLL_S = 0.002
PROBE_WAIT_S = 10.0
"""Longer than almost any sample takes: batches that are read before their size is known may have to be read twice."""
FREE_SLOTS = 2
"""Slots that the user's batches may not occupy: one is being filled while the next is ready."""


@dataclass(eq=False, repr=False)
class LoaderPass:
    """Iterator over the batches of an epoch.

        sampler --request--> free slot --workers--> parts --assemble--> batch

    A batch's tensors are views of its slot, which is filled again when the last of them is gone. If the user keeps
    many batches, further ones are copies instead.
    """

    runtime: LoaderRuntime
    requests: Iterator[BatchRequest]
    assembler: Assembler
    length: Callable[[], int]
    timeout_s: float
    finish_batch: Callable[[Any], Any]
    on_parts: Callable[[list[BatchPart]], None]
    on_end: Callable[[LoaderRuntime, bool], None]

    def __post_init__(self) -> None:
        self._in_flight: deque[tuple[int, BatchRequest]] = deque()
        self._num_published = 0
        self.has_ended = False
        self._publish_ahead()

    def __iter__(self) -> "LoaderPass":
        return self

    def __len__(self) -> int:
        return self.length()

    def __next__(self) -> Any:
        if self.has_ended:
            raise StopIteration
        try:
            self._publish_ahead()
            if not self._in_flight:
                self._end(cleanly=True)
                raise StopIteration
            slot, request = self._in_flight[0]
            self._wait_for(slot)
            self._in_flight.popleft()
            parts = self.runtime.collect(slot)
        except (StopIteration, TimeoutError):
            raise
        except DataError as error:
            self._end(cleanly=False)
            raise _fatal_sample(error, self.runtime.supervisor) from error.__cause__
        except BaseException:
            self._end(cleanly=False)  # the queue is in an unknown state: slots and workers must be created again
            raise
        self.runtime.slots.require_body(max(part.body_bytes for part in parts))
        self.on_parts(parts)
        batch = self._hand_out(slot, request, parts)
        self._publish_ahead()
        return batch

    def _hand_out(self, slot: int, request: BatchRequest, parts: list[BatchPart]) -> Any:
        slots = self.runtime.slots
        copy_tensors = slots.refs.num_in_use + 1 + FREE_SLOTS > len(slots.usable)
        body = slots.buffers.body(slot)
        batch, arrays = self.assembler.assemble(
            parts, body, len(request.keys), request.micro_batch, copy_tensors=copy_tensors
        )
        slots.refs.add(slot, arrays)
        return self.finish_batch(batch)

    def _publish_ahead(self) -> None:
        self.runtime.poll_probe(margin=1)
        slots, busy = self.runtime.slots, {slot for slot, _ in self._in_flight} | self.runtime.probing
        for slot in slots.usable:
            if slot not in busy and slots.refs.is_free(slot):
                request = next(self.requests, None)
                if request is None:
                    return
                self._in_flight.append((slot, request))
                self.runtime.publish(slot, request, lane=self._num_published % slots.ring.spec.num_lanes)
                self._num_published += 1

    def _wait_for(self, slot: int) -> None:
        with clock.stage("feed.wait"):
            deadline = time.monotonic() + self.timeout_s
            while self.timeout_s and not self.runtime.supervisor.is_ready(slot):
                if time.monotonic() > deadline:
                    raise BatchTimeoutError(
                        # The first words are torch's: some programs look for them.
                        f"DataLoader timed out after {self.timeout_s:g} seconds without a batch. Use a larger timeout "
                        "or 0 for none; with num_workers=0 you see where the dataset spends its time."
                    )
                time.sleep(POLL_S)
            self.runtime.supervisor.wait_until_ready(slot)  # raises what went wrong

    def _end(self, *, cleanly: bool) -> None:
        self.has_ended = True
        self.on_end(self.runtime, cleanly)


class BatchTimeoutError(RuntimeError, TimeoutError):
    """No batch was ready within `timeout`; the next call of `next()` waits again."""


def probe_size(runtime: LoaderRuntime, probe: BatchRequest, margin: float) -> None:
    """Read one sample to find out how large batches are; its errors are raised with its batch.

    Waits for at most `PROBE_WAIT_S`: the sample may be waiting for samples that other workers will read. Until the size
    is known, batches are sent by pickle.
    """
    runtime.probe(probe)
    deadline = time.monotonic() + PROBE_WAIT_S
    try:
        while not runtime.poll_probe(margin) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    except DataError as error:
        raise _fatal_sample(error, runtime.supervisor) from error.__cause__


def _fatal_sample(error: DataError, supervisor: Supervisor) -> FlatoutError:
    deadly = [f"{supervisor.where(item)} ({cause})" for item, cause in supervisor.bad.items()]
    if not deadly:
        return error
    return ChildLostError(
        f"A sample kills the workers that read it: {' and '.join(deadly)}. Read it in a process of its own to see why."
    )
