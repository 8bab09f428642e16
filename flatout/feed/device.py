"""The way of a batch to the GPU: one batch ahead, on a stream of its own, without a host-device wait.

    slot (pinned) --copy stream--> device buffer A | B --compute stream--> training step

While the step works on buffer A, the next batch is copied into B. Streams wait for each other by
events on the device; the host only asks whether a copy has ended, to give its slot back.

Batches that are rendered on the device: workers draw numbers, the pixels never leave the device.

    worker: draw + small fields -> slot -> copy stream: copy, stage, render -> out A | B -> training step

The same feed, order, randomness and resume as on the host: a renderer gets sources and explicit
parameters and has no randomness of its own, so what it makes follows from (seed, epoch, step).
"""

import itertools
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flatout.clock import clock
from flatout.errors import ConfigError, ResourceError
from flatout.feed.batch import Batch, RowsBuffer
from flatout.feed.device_store import Brought, DeviceStore, Sources
from flatout.feed.feed import Feed
from flatout.feed.runtime import FeedRuntime, Lease
from flatout.feed.streamed_items import CHUNKS, NUMBERS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceBatch:
    """A batch whose fields are tensors on a device; the bookkeeping stays on the host.

    Borrowed: the tensors are overwritten after the next `next()`, once the work queued by then is done.
    """

    epoch: int
    step: int
    num_valid: int
    indices: np.ndarray
    positions: np.ndarray
    fields: dict[str, Tensor]
    """Field -> [B, *shape of this step]; Rows -> [T, width]."""

    counts: dict[str, np.ndarray]
    """Rows field -> int32 [B] on the host: the loss can plan without asking the device."""

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def __len__(self) -> int:
        return len(self.indices)


DevicePass = Generator[DeviceBatch, None, None]


class HostPass(Protocol):
    """The batches of an epoch in the slots they were made in, below the copy to the device: what `Feed.open` gives."""

    @property
    def works(self) -> FeedRuntime: ...

    def is_ready(self) -> bool: ...

    def take(self) -> Lease | None: ...

    def give_back(self, lease: Lease) -> None: ...

    def position_after(self, step: int) -> tuple[int, int]: ...


OpenPass = Callable[[Feed, int, int], HostPass]
"""(feed, epoch, first step) -> the pass that is copied to the device."""


class DeviceBatches:
    """A feed's stream as tensors on a device. Its state is that of the batch handed out last."""

    def __init__(self, feed: Feed, device: str | torch.device) -> None:
        self.feed = feed
        self.device = torch.device(device)
        self.open_pass: OpenPass = Feed.open
        """Opens the passes below the copies; may be replaced before the first epoch, to copy other ones."""
        self.held_back_s = 0.0
        """Seconds for which the host, asking for a batch, waited for a device that was behind: no wait for data."""
        self._position: tuple[int, int] | None = None
        # Weak, or both would live until a collection; in a forked child torch's events do not survive one.
        self._pass: weakref.ref[DevicePass] | None = None

    def __len__(self) -> int:
        return len(self.feed)

    def __iter__(self) -> Iterator[DeviceBatch]:
        state = self.state_dict()
        return self.epoch(state["epoch"], start=state["next_step"])

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DeviceBatch]:
        """The batches of an epoch from step `start` on."""
        if self._pass is not None and (unfinished := self._pass()) is not None:
            unfinished.close()  # its copies must end before the slots they read are used anew
        run = self.open_pass(self.feed, epoch, start)
        self._position = (epoch, start)
        batches = self._copied_ahead(run) if self.device.type == "cuda" else self._wrapped(run)
        tracked = self._tracked(run, batches)
        self._pass = weakref.ref(tracked)
        return tracked

    def state_dict(self) -> dict[str, Any]:
        """As Feed.state_dict, but of the batch that left here last: copies run ahead of the step."""
        return self.feed.state_dict() if self._position is None else self.feed.state_at(*self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.feed.load_state_dict(state)
        self._position = None

    def _finish(self, turn: int, batch: Batch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is done with a batch on the device before it is handed out; on the stream of the copy."""
        return tensors

    def _tracked(self, run: HostPass, batches: DevicePass) -> DevicePass:
        with closing(batches):
            for batch in batches:
                self._position = run.position_after(batch.step)
                yield batch

    def _wrapped(self, run: HostPass) -> DevicePass:
        """On the host nothing is copied: tensors are views of the slot."""
        for turn in itertools.count():
            if (lease := run.take()) is None:
                return
            views = {name: _tensor(array) for name, array in lease.batch.fields.items()}
            yield _device_batch(lease.batch, self._finish(turn, lease.batch, views))
            run.give_back(lease)

    def _copied_ahead(self, run: HostPass) -> DevicePass:
        """Before a batch is handed out, the copy of the next one is under way if it is complete by then."""
        copier = _Copier(run, self.device, self._finish, self._count_held_back)
        try:
            while copier.copy_next():
                current = copier.next_copied()
                if run.is_ready():
                    copier.copy_next()
                yield current
                copier.mark_consumed()
        finally:
            copier.give_all_back()

    def _count_held_back(self, seconds: float) -> None:
        self.held_back_s += seconds


Finish = Callable[[int, Batch, dict[str, Tensor]], dict[str, Tensor]]


class _Copy(NamedTuple):
    """A copy under way, and the event that ends it."""

    lease: Lease
    batch: DeviceBatch
    done: torch.cuda.Event


class _Copier:
    """Two sets of device buffers, filled in turn on a side stream."""

    def __init__(self, run: HostPass, device: torch.device, finish: Finish, held_back: Callable[[float], None]) -> None:
        """`held_back` hears for how many seconds the device was waited for."""
        self._run = run
        self._finish, self._held_back = finish, held_back
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Whatever is still queued may use the buffers of an earlier pass.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = _Buffers(device), _Buffers(device)
        self._consumed: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._copied: deque[_Copy] = deque()  # not handed out yet
        self._held: deque[_Copy] = deque()  # slots that a copy may still read
        pin_slots(run.works)

    def copy_next(self) -> bool:
        """Have a batch on its way that was not handed out; waits for the feed if it must. False at the end."""
        if self._copied:
            return True
        self._give_back_ended()
        lease = self._run.take()
        if lease is None:
            return False
        copy = self._copy(lease)
        self._copied.append(copy)
        self._held.append(copy)
        return True

    def next_copied(self) -> DeviceBatch:
        """The oldest batch on its way; the current stream waits for it, the host does not."""
        copy = self._copied.popleft()
        torch.cuda.current_stream(self._device).wait_event(copy.done)
        return copy.batch

    def mark_consumed(self) -> None:
        """Everything that uses the batch handed out last is queued by now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        # If the next copy is under way, it has taken the other turn since.
        self._consumed[(self._turn - len(self._copied) - 1) % 2] = event

    def give_all_back(self) -> None:
        """Host-device wait: a pass that ends must not leave copies that read slots about to be refilled."""
        while self._held:
            copy = self._held.popleft()
            copy.done.synchronize()
            self._run.give_back(copy.lease)

    def _copy(self, lease: Lease) -> _Copy:
        turn, self._turn = self._turn, self._turn + 1
        buffers, consumed = self._buffers[turn % 2], self._consumed[turn % 2]
        tensors = buffers.views_for(lease.batch, self._stream)
        if consumed is not None:
            self._stream.wait_event(consumed)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            with clock.stage("transfer"):
                for name, tensor in tensors.items():
                    tensor.copy_(_tensor(lease.batch[name]), non_blocking=True)
            batch = _device_batch(lease.batch, self._finish(turn, lease.batch, tensors))
            done.record(self._stream)
        return _Copy(lease, batch, done)

    def _give_back_ended(self) -> None:
        while self._held:
            if not self._held[0].done.query():
                if len(self._held) < self._run.works.ring.spec.num_slots - 1:
                    return
                # Host-device wait: the device is behind by so many batches that copies hold all slots but one.
                began = time.perf_counter()
                self._held[0].done.synchronize()
                self._held_back(time.perf_counter() - began)
            self._run.give_back(self._held.popleft().lease)


class _Buffers:
    """Device memory for one batch, reused for every second one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def views_for(self, batch: Batch, copy_stream: torch.cuda.Stream) -> dict[str, Tensor]:
        """A tensor per field with the shapes of this batch."""
        return {name: self._view(name, array, copy_stream) for name, array in batch.fields.items()}

    def _view(self, name: str, array: np.ndarray, copy_stream: torch.cuda.Stream) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < array.nbytes:
            memory = torch.empty(array.nbytes + array.nbytes // 4, dtype=torch.uint8, device=self._device)
            self._memory[name] = memory
            # The allocator may hand out memory that queued work still uses; that work is on this stream.
            copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        return memory[: array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)


class PinnedRowsBuffer(RowsBuffer):
    """Gathered rows in pinned memory."""

    def allocate(self, nbytes: int) -> np.ndarray:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def pin_slots(works: FeedRuntime) -> None:
    """Register the slots with CUDA, once per feed, so that copies from them do not block the host."""
    stream = works.stream
    if isinstance(stream.buffers[0], PinnedRowsBuffer):
        return
    stream.buffers = [PinnedRowsBuffer() for _ in stream.buffers]
    memory, cudart = works.ring.arena.extent(0, works.ring.spec.fixed_bytes), torch.cuda.cudart()
    status = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(status) != 0:
        logger.warning(
            "The feed's slots could not be pinned (%s): each copy to the GPU blocks the host and runs at about half "
            "the speed. Raise the locked-memory limit (ulimit -l).",
            status,
        )
        return
    works.before_close.append(lambda: cudart.cudaHostUnregister(memory.ctypes.data))


def _device_batch(batch: Batch, tensors: dict[str, Tensor]) -> DeviceBatch:
    # The bookkeeping is copied: the slot is refilled while the step still runs.
    return DeviceBatch(
        epoch=batch.epoch,
        step=batch.step,
        num_valid=batch.num_valid,
        indices=batch.indices.copy(),
        positions=batch.positions.copy(),
        fields=tensors,
        counts={name: counts.copy() for name, counts in batch.counts.items()},
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Render(Protocol):
    """Fills `out` from `sources` and `params` on the current stream, without a host-device wait."""

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None: ...


class Output(NamedTuple):
    """A tensor that is rendered; `outputs` of a feed may also be plain tuples of the first two or of all three."""

    shape: tuple[int, ...]
    """Per sample; the largest one where steps differ."""
    dtype: torch.dtype
    channels_last: bool = False
    """[C, H, W] per sample, with the channels of a pixel side by side in memory."""


class DeviceFeed(DeviceBatches):
    """A feed of parameters, rendered one batch ahead of the step.

    The feed's source has a field of item numbers, int [B] or [B, n]; its other fields arrive as
    `params`. A batch holds them and the rendered `outputs`, by name. Where the store does not keep
    all items, the source brings the others along (`DeviceStore.bringing`).
    """

    def __init__(
        self,
        feed: Feed,
        store: DeviceStore,
        render: Render,
        outputs: Mapping[str, Output | tuple[tuple[int, ...], torch.dtype]],
        *,
        items: str = "items",
    ) -> None:
        super().__init__(feed, store.device)
        if items not in feed.source.fields:
            raise ConfigError(f"The source has no field '{items}' that says which items a sample is made of.")
        if clash := sorted(set(outputs) & set(feed.source.fields)):
            raise ConfigError(f"Output '{clash[0]}' has the name of a field of the source: rename one of them.")
        if store.num_away and NUMBERS not in feed.source.fields:
            raise ResourceError(
                f"{store.num_away} of {len(store)} items fit neither on {store.device} nor into half of the free RAM, "
                "and the source does not bring them. Use a larger budget, smaller items or fewer of them."
            )
        self._store = store
        self._render = render
        self._items = items
        self._outputs = {name: Output(*output) for name, output in outputs.items()}
        # Two sets, filled in turn: one is trained on while the other is rendered.
        self._memory = [
            {
                name: torch.empty(feed.plan.batch_size * math.prod(shape), dtype=dtype, device=store.device)
                for name, (shape, dtype, _) in self._outputs.items()
            }
            for _ in range(2)
        ]

    def shape_of(self, name: str, batch: Batch) -> tuple[int, ...]:
        """Per-sample shape of an output in this batch, no larger than promised; for classes that vary it."""
        return self._outputs[name].shape

    def _finish(self, turn: int, batch: Batch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        sources = self._store.sources_of(batch[self._items], tensors[self._items], self._brought(batch, tensors))
        out = {
            name: _shaped(memory, (len(batch), *self.shape_of(name, batch)), self._outputs[name].channels_last)
            for name, memory in self._memory[turn % 2].items()
        }
        with clock.stage("render"):
            self._render(sources, tensors, out)
        return tensors | out

    def _brought(self, batch: Batch, tensors: Mapping[str, Tensor]) -> Brought | None:
        """The items that came with this batch."""
        return Brought(batch[NUMBERS][:, 0], tensors[CHUNKS]) if NUMBERS in batch.fields else None


def _shaped(memory: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """The first part of flat memory as a tensor without gaps."""
    part = memory[: math.prod(shape)]
    if not channels_last:
        return part.view(shape)
    num, channels, height, width = shape
    return part.view(num, height, width, channels).permute(0, 3, 1, 2)
