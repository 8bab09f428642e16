"""Batches on the GPU: copied one batch ahead on a separate stream, without a host-device wait, or rendered there.

    slot (pinned) --copy stream--> device buffer A | B --compute stream--> training step

While the step works on buffer A, the next batch is copied into B. Streams wait for each other by events on the device;
the host only queries whether a copy has ended, to give its slot back.

In a `DeviceFeed`, batches are rendered on the device: workers draw numbers, and the pixels never leave the device.

    worker: draw + small fields -> slot -> copy stream: copy, stage, render -> out A | B -> training step

Order, randomness and resume are the same as on the host: a renderer gets sources and explicit parameters and has no
randomness of its own, so its output is a function of (seed, epoch, step).
"""

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flatout.clock import clock
from flatout.errors import ConfigError, ResourceError
from flatout.feed.background_fill import BackgroundFill
from flatout.feed.batch import Batch, RowsBuffer, StepBatch
from flatout.feed.device_store import DeviceStore, Sources, StreamedChunks
from flatout.feed.feed import Feed
from flatout.feed.runtime import FeedRuntime, Lease
from flatout.feed.streamed_items import CHUNKS, NUMBERS

logger = logging.getLogger(__name__)


# Copied batches


class DeviceBatch(StepBatch[Tensor]):
    """A batch whose fields are tensors on a device; indices, positions and counts stay on the host, where the loss can
    use them without a host-device wait.

    Borrowed: the tensors are overwritten after the next `next()`, once the work queued by then is done.
    """


DevicePass = Generator[DeviceBatch, None, None]


class HostPass(Protocol):
    """The host batches of an epoch, still in their slots, from which they are copied; `Feed.open` returns one."""

    @property
    def runtime(self) -> FeedRuntime: ...

    def is_ready(self) -> bool: ...

    def take(self) -> Lease | None: ...

    def give_back(self, lease: Lease) -> None: ...

    def position_after(self, step: int) -> tuple[int, int]: ...


OpenPass = Callable[[Feed, int, int], HostPass]
"""(feed, epoch, first step) -> the pass whose batches are copied to the device."""


class DeviceBatches:
    """A feed's stream as tensors on a device. Its state is the one after the batch that was yielded last."""

    def __init__(self, feed: Feed, device: str | torch.device) -> None:
        self.feed = feed
        self.device = torch.device(device)
        self.open_pass: OpenPass = Feed.open
        """Opens the host passes; may be replaced before the first epoch, to copy from a different pass."""
        self.device_wait_s = 0.0
        """Seconds that the host spent waiting for a device that was behind when it requested a batch; not data time."""
        self.fill_wait_s = 0.0
        """Seconds that it spent waiting for items that were still being read: they are read only once."""
        self._position: tuple[int, int] | None = None
        # Weak, because a cycle would live until a garbage collection; in a forked child torch's events do not survive
        # one.
        self._pass: weakref.ref[DevicePass] | None = None

    def __len__(self) -> int:
        return len(self.feed)

    def __iter__(self) -> Iterator[DeviceBatch]:
        state = self.state_dict()
        return self.epoch(state["epoch"], start=state["next_step"])

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DeviceBatch]:
        """The batches of an epoch, from step `start` on."""
        if self._pass is not None and (unfinished := self._pass()) is not None:
            unfinished.close()  # its copies must end before the slots they read are filled again
        host_pass = self._open(epoch, start)
        self._position = (epoch, start)
        batches = self._copied_ahead(host_pass) if self.device.type == "cuda" else self._wrapped(host_pass)
        tracked = self._tracked(host_pass, batches)
        self._pass = weakref.ref(tracked)
        return tracked

    def state_dict(self) -> dict[str, Any]:
        """Like Feed.state_dict, but after the batch that was yielded here last: copies run ahead of the step."""
        return self.feed.state_dict() if self._position is None else self.feed.state_at(*self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.feed.load_state_dict(state)
        self._position = None

    @property
    def fill_left_s(self) -> float:
        """Expected seconds until all items are read; 0 if no steps wait for that."""
        return 0.0

    def _open(self, epoch: int, start: int) -> HostPass:
        return self.open_pass(self.feed, epoch, start)

    def _finish(self, turn: int, batch: Batch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Process a batch on the device before it is yielded, on the copy stream; for subclasses.

        `turn` counts the batches of a pass.
        """
        return tensors

    def _tracked(self, host_pass: HostPass, batches: DevicePass) -> DevicePass:
        with closing(batches):
            for batch in batches:
                self._position = host_pass.position_after(batch.step)
                yield batch

    def _wrapped(self, host_pass: HostPass) -> DevicePass:
        """Batches on the CPU, without a copy: tensors are views of the slot."""
        for turn, lease in enumerate(iter(host_pass.take, None)):
            views = {name: torch.from_numpy(array) for name, array in lease.batch.fields.items()}
            yield _device_batch(lease.batch, self._finish(turn, lease.batch, views))
            host_pass.give_back(lease)

    def _copied_ahead(self, host_pass: HostPass) -> DevicePass:
        """Batches on the GPU; before one is yielded, the copy of the next is started if that is complete."""
        copier = _Copier(host_pass, self)
        try:
            while copier.copy_next():
                current = copier.next_copied()
                if host_pass.is_ready():
                    copier.copy_next()
                yield current
                copier.mark_consumed()
        finally:
            copier.give_all_back()


class _Copy(NamedTuple):
    """A copy in progress, and the event that marks its end."""

    lease: Lease
    batch: DeviceBatch
    done: torch.cuda.Event


class _Copier:
    """Two sets of device buffers, filled alternately on a separate stream."""

    def __init__(self, host_pass: HostPass, owner: DeviceBatches) -> None:
        self._host_pass, self._owner = host_pass, owner
        self._device = device = owner.device
        self._stream = torch.cuda.Stream(device)
        # Work that is still queued may use the buffers of an earlier pass.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self._consumed: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._copied: deque[_Copy] = deque()  # not yielded yet
        self._held: deque[_Copy] = deque()  # slots that a copy may still read
        pin_slots(host_pass.runtime)

    def copy_next(self) -> bool:
        """Start copying the next batch unless one is already waiting; waits for the feed. False at the end."""
        if self._copied:
            return True
        self._give_back_ended()
        lease = self._host_pass.take()
        if lease is None:
            return False
        copy = self._copy(lease)
        self._copied.append(copy)
        self._held.append(copy)
        return True

    def next_copied(self) -> DeviceBatch:
        """The oldest batch not yielded yet; the current stream waits for its copy, the host does not."""
        copy = self._copied.popleft()
        torch.cuda.current_stream(self._device).wait_event(copy.done)
        return copy.batch

    def mark_consumed(self) -> None:
        """Record that all work on the batch yielded last has been queued."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        # If the next copy has been started, it uses the other set of buffers.
        self._consumed[(self._turn - len(self._copied) - 1) % 2] = event

    def give_all_back(self) -> None:
        """Wait for all copies and return their slots, which are about to be refilled. A host-device wait."""
        while self._held:
            copy = self._held.popleft()
            copy.done.synchronize()
            self._host_pass.give_back(copy.lease)

    def _copy(self, lease: Lease) -> _Copy:
        turn, self._turn = self._turn, self._turn + 1
        buffers, consumed = self._buffers[turn % 2], self._consumed[turn % 2]
        tensors = {name: self._view(buffers, name, array) for name, array in lease.batch.fields.items()}
        if consumed is not None:
            self._stream.wait_event(consumed)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            with clock.stage("transfer"):
                for name, tensor in tensors.items():
                    tensor.copy_(torch.from_numpy(lease.batch[name]), non_blocking=True)
            batch = _device_batch(lease.batch, self._owner._finish(turn, lease.batch, tensors))
            done.record(self._stream)
        return _Copy(lease, batch, done)

    def _view(self, buffers: dict[str, Tensor], name: str, array: np.ndarray) -> Tensor:
        """Device memory for a field, as a tensor of its shape in this batch; it grows as batches need more."""
        memory = buffers.get(name)
        if memory is None or memory.numel() < array.nbytes:
            memory = buffers[name] = torch.empty(
                array.nbytes + array.nbytes // 4, dtype=torch.uint8, device=self._device
            )
            # The allocator may return memory that queued work on the current stream still uses.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return memory[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)

    def _give_back_ended(self) -> None:
        while self._held:
            if not self._held[0].done.query():
                if len(self._held) < self._host_pass.runtime.ring.spec.num_slots - 1:
                    return
                # Host-device wait: the device is so many batches behind that copies hold all slots but one.
                began = time.perf_counter()
                self._held[0].done.synchronize()
                self._owner.device_wait_s += time.perf_counter() - began
            self._host_pass.give_back(self._held.popleft().lease)


class PinnedRowsBuffer(RowsBuffer):
    """A RowsBuffer in pinned memory."""

    def allocate(self, nbytes: int) -> np.ndarray:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def pin_slots(runtime: FeedRuntime) -> None:
    """Pin the slots, once per feed, so that copies from them do not block the host."""
    stream = runtime.stream
    if isinstance(stream.buffers[0], PinnedRowsBuffer):
        return
    stream.buffers = [PinnedRowsBuffer() for _ in stream.buffers]
    memory, cudart = runtime.ring.arena.extent(0, runtime.ring.spec.fixed_bytes), torch.cuda.cudart()
    status = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(status) != 0:
        logger.warning(
            "The feed's slots could not be pinned (%s): each copy to the GPU blocks the host and runs at about half "
            "speed. Raise the locked-memory limit (ulimit -l).",
            status,
        )
        return
    runtime.before_close.append(lambda: cudart.cudaHostUnregister(memory.ctypes.data))


def pin_slots_of_fill(device_index: int, runtime: FeedRuntime) -> None:
    """Pin the slots of a fill in its thread, which uses this GPU from then on."""
    torch.cuda.set_device(device_index)
    pin_slots(runtime)


def _device_batch(batch: Batch, tensors: dict[str, Tensor]) -> DeviceBatch:
    # Indices, positions and counts are copied: the slot is refilled while the step still runs.
    return DeviceBatch(
        epoch=batch.epoch,
        step=batch.step,
        num_valid=batch.num_valid,
        indices=batch.indices.copy(),
        positions=batch.positions.copy(),
        fields=tensors,
        counts={name: counts.copy() for name, counts in batch.counts.items()},
    )


# Rendered batches


class Render(Protocol):
    """Fills `out` from `sources` and `params` on the current stream, without a host-device wait."""

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None: ...


class Output(NamedTuple):
    """A rendered tensor; the `outputs` of a feed may also be plain tuples of the first two or of all three."""

    shape: tuple[int, ...]
    """Per-sample shape; the largest one if it differs between steps."""
    dtype: torch.dtype
    channels_last: bool = False
    """Whether a sample [C, H, W] is stored with the channels of a pixel next to each other."""


class DeviceFeed(DeviceBatches):
    """A feed of parameters whose batches are rendered one batch ahead of the step.

    The feed's source has a field of item numbers, int [B] or [B, n]; its other fields are passed as `params`. A batch
    contains all of these and the rendered `outputs`, by name. Items that the store does not keep must be streamed by
    the source (`DeviceStore.streamed_items`).
    """

    def __init__(
        self,
        feed: Feed,
        store: DeviceStore,
        render: Render,
        outputs: Mapping[str, Output | tuple[tuple[int, ...], torch.dtype]],
        *,
        items: str = "items",
        fill: BackgroundFill | None = None,
    ) -> None:
        """`fill` is still putting items into the store: every batch waits for those that it is rendered from."""
        super().__init__(feed, store.device)
        self._filling, self._has_waited = fill, False
        self._filled_weights = feed.plan.weights
        if items not in feed.source.fields:
            raise ConfigError(
                f"The source has no field '{items}'. Give it one with the item numbers of each sample, "
                "or pass its name as items=..."
            )
        if clash := sorted(set(outputs) & set(feed.source.fields)):
            raise ConfigError(f"Output '{clash[0]}' has the same name as a field of the source: rename one of them.")
        if store.num_streamed and NUMBERS not in feed.source.fields:
            raise ResourceError(
                f"{store.num_streamed} of {len(store)} items fit neither on {store.device} nor into half of the "
                "free RAM, and the source does not stream them. Use a larger budget, smaller items or fewer of them."
            )
        self._store = store
        self._render = render
        self._items = items
        self._outputs = {name: Output(*output) for name, output in outputs.items()}
        # Two sets, filled alternately: one is trained on while the other is rendered.
        self._memory = [
            {
                name: torch.empty(feed.plan.batch_size * math.prod(shape), dtype=dtype, device=store.device)
                for name, (shape, dtype, _) in self._outputs.items()
            }
            for _ in range(2)
        ]

    def shape_of(self, name: str, batch: Batch) -> tuple[int, ...]:
        """Per-sample shape of an output in this batch, no larger than declared; for subclasses that vary it."""
        return self._outputs[name].shape

    @property
    def fill_left_s(self) -> float:
        return 0.0 if self._filling is None else self._filling.seconds_left

    def _open(self, epoch: int, start: int) -> HostPass:
        if self._filling is None:
            return super()._open(epoch, start)
        if self.open_pass is not Feed.open or self.feed.plan.weights is not self._filled_weights:
            # These are not the batches for which the items are read in this order.
            self._wait_for_items(math.inf, 0)
            return super()._open(epoch, start)
        return _FilledPass(self, self._filling, epoch, start)

    def close_fill(self) -> None:
        """End the reading of items for the store, if it is still going on; batches cannot be taken any more then."""
        if self._filling is not None:
            self._filling.close()

    def _wait_for_items(self, epoch: float, step: int) -> bool:
        """Wait until a step can begin. False if unreadable items were found meanwhile, which are replaced from now on:
        the step is to be drawn again."""
        fill = self._filling
        if fill is None:
            return True
        began = time.perf_counter()
        with clock.stage("feed.wait"):
            is_usable = fill.wait_for(epoch, step)
        self.fill_wait_s += time.perf_counter() - began
        if not self._has_waited and (num_left := fill.num_left):
            logger.info(
                "Training begins while %d of %d images are still to be decoded: it waits for those that it needs next.",
                num_left,
                len(fill),
            )
        self._has_waited = True
        if not is_usable:
            if self.device.type == "cuda":
                # Copies from the slots must end before these are filled again.
                torch.cuda.synchronize(self.device)
            self.feed.exclude(fill.unreadable)
            self._filling = None
        elif fill.is_over and not fill.unreadable:
            self._filling = None
        return is_usable

    def _finish(self, turn: int, batch: Batch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        sources = self._store.sources_of(batch[self._items], tensors[self._items], self._streamed(batch, tensors))
        out = {
            name: _shaped(memory, (len(batch), *self.shape_of(name, batch)), self._outputs[name].channels_last)
            for name, memory in self._memory[turn % 2].items()
        }
        with clock.stage("render"):
            self._render(sources, tensors, out)
        return tensors | out

    def _streamed(self, batch: Batch, tensors: Mapping[str, Tensor]) -> StreamedChunks | None:
        """The items that were streamed with this batch; None if its source streams none."""
        return StreamedChunks(batch[NUMBERS][:, 0], tensors[CHUNKS]) if NUMBERS in batch.fields else None


class _FilledPass:
    """A pass whose batches are handed out when the items that they are rendered from are in the store.

    Batches that were drawn before it was known that an item is unreadable are drawn again.
    """

    def __init__(self, owner: DeviceFeed, fill: BackgroundFill, epoch: int, start: int) -> None:
        self._owner, self._fill = owner, fill
        self._pass = owner.open_pass(owner.feed, epoch, start)
        self._next = epoch, start
        self._leases: dict[int, Lease] = {}
        """Leases of the present pass, by identity: the slots of an earlier one are in use again."""

    @property
    def runtime(self) -> FeedRuntime:
        return self._pass.runtime

    def is_ready(self) -> bool:
        is_filled = self._owner._filling is None or self._fill.is_ready(*self._next)
        return is_filled and self._pass.is_ready()

    def take(self) -> Lease | None:
        lease = self._pass.take()
        if lease is None:
            return None
        epoch, step = lease.batch.epoch, lease.batch.step
        if not self._owner._wait_for_items(epoch, step):
            self._leases.clear()
            self._pass = self._owner.open_pass(self._owner.feed, epoch, step)
            lease = self._pass.take()
            assert lease is not None  # it is the same step
        self._leases[id(lease)] = lease
        self._next = self._pass.position_after(step)
        return lease

    def give_back(self, lease: Lease) -> None:
        if self._leases.pop(id(lease), None) is not None:
            self._pass.give_back(lease)

    def position_after(self, step: int) -> tuple[int, int]:
        return self._pass.position_after(step)


def _shaped(memory: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """The beginning of flat memory as a dense tensor."""
    part = memory[: math.prod(shape)]
    if not channels_last:
        return part.view(shape)
    num, channels, height, width = shape
    return part.view(num, height, width, channels).permute(0, 3, 1, 2)
