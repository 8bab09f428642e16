"""The device store: decoded arrays kept in device memory, with pinned RAM for those that do not fit.

All items are in one flat buffer, each starting at an offset; a render function gathers from it. Items that stay in RAM
are staged into the end of that buffer when a batch needs them, by one gather that reads the pinned memory across the
bus. That costs the host a few microseconds, whatever the number of items, and is faster than one copy per item
(bench/device_feed.py). Items that fit into neither memory stay where they are, and are streamed with the batches
(streamed_items.py).

Dimension key:  N items   D dimensions of an item   Q items of a batch   K streamed items   C chunks   W chunk width
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.clock import machine
from flatout.errors import ConfigError, DataError, ResourceError
from flatout.feed.batch import Arrays, ShapedArrays
from flatout.feed.source import UNREADABLE_ERRORS, read_with_retries
from flatout.feed.streamed_items import StreamedItems
from flatout.feed.worker import cause_of
from flatout.progress import progress

logger = logging.getLogger(__name__)

# Upload of arrays into one flat buffer, on the host or a device

BLOCK_CHUNKS = 1 << 16


def upload(
    read: Callable[[int], np.ndarray],
    numbers: range,
    begin_N: np.ndarray,
    chunks_N: np.ndarray,
    target: Tensor,
    name: str,
) -> None:
    """Write the arrays `numbers` that `read` returns into the rows (chunks) of `target`, starting at begin_N; blocks
    until they are there.

    Uses several threads, and shows a progress bar called `name`.
    """
    on_device = target.device.type == "cuda"
    with progress(name, len(numbers)) as advance, ThreadPoolExecutor(4) as pool:
        for group in _blocks(numbers, chunks_N):
            begin, end = int(begin_N[group[0]]), int(begin_N[group[-1]] + chunks_N[group[-1]])
            rows = target[begin:end]
            # The allocator reuses a pinned block only when its copy has ended, so the threads fill the next block while
            # this one is being copied.
            block = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True) if on_device else rows
            starts = (begin_N[group.start : group.stop] - begin) * rows.shape[1] * rows.element_size()
            memory = block.view(-1).view(torch.uint8).numpy()
            list(pool.map(partial(_write_at, memory, read), group, starts.tolist()))
            if on_device:
                rows.copy_(block, non_blocking=True)
            advance(
                group.stop - numbers.start, (end - int(begin_N[numbers.start])) * rows.shape[1] * rows.element_size()
            )
    if on_device:
        torch.cuda.current_stream(target.device).synchronize()


def _write_at(memory: np.ndarray, read: Callable[[int], np.ndarray], number: int, start: int) -> None:
    array = np.ascontiguousarray(read(number))
    memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)


def _blocks(numbers: range, chunks_N: np.ndarray) -> Iterator[range]:
    """Groups of consecutive items, each of about BLOCK_CHUNKS and at least one item."""
    begin, size = numbers.start, 0
    for index in numbers:
        if size and size + chunks_N[index] > BLOCK_CHUNKS:
            yield range(begin, index)
            begin, size = index, 0
        size += int(chunks_N[index])
    if begin < numbers.stop:
        yield range(begin, numbers.stop)


# The store

CHUNK_BYTES = 1024
"""Items are aligned to chunks, and staging copies whole chunks."""
DEVICE_SHARE, RAM_SHARE = 0.8, 0.5
"""Shares of the free memory that a store may take if no budget is given."""


class Sources(NamedTuple):
    """The items of a batch, for a render function; everything on the device."""

    data: Tensor
    """All items as one flat tensor, in the items' dtype."""

    offsets: Tensor
    """int64, shaped like the batch's item numbers: the offset in `data` at which each item begins."""

    shapes: Tensor
    """int64 [..., D], the shape of each item."""


class StreamedChunks(NamedTuple):
    """Items that were streamed with a batch; an item may occur more than once."""

    number_K: np.ndarray
    """Item numbers, int, on the host."""
    chunks_CW: Tensor
    """uint8, on the device: the chunks of all K items, one after another."""


class Residence(NamedTuple):
    """Where each item is kept: the first ones on the device, the next ones in pinned RAM. Sizes are in chunks."""

    num_resident: int
    num_pinned: int
    begin_N: np.ndarray
    """First chunk of each item in the memory that keeps it; meaningless for streamed items."""

    device_chunks: int
    host_chunks: int
    """Chunks of the pinned items."""

    @property
    def num_kept(self) -> int:
        """Number of items on the device or in pinned RAM; items from this number on are streamed."""
        return self.num_resident + self.num_pinned


def chunks_of(bytes_N: np.ndarray) -> np.ndarray:
    """Number of chunks that items of `bytes_N` bytes take, int64 [N]."""
    return np.asarray(-(-bytes_N // CHUNK_BYTES))


def settle(
    chunks_N: np.ndarray, *, budget: int, batch_items: int, pinned_budget: int | None = None
) -> tuple[Residence, int]:
    """Decide where items are kept; also returns the chunks reserved for staging. Sizes and budgets are in chunks.

    The first items stay on the device, as many as fit into `budget`. Of the others, as many as fit into
    `pinned_budget` (None: all) stay in pinned RAM.
    """
    everything = int(chunks_N.sum())
    staging = 0 if everything <= budget else int(np.sort(chunks_N)[-batch_items:].sum())
    ends_N = np.cumsum(chunks_N)
    num_resident = int(np.searchsorted(ends_N, budget - staging, side="right"))
    device_chunks = int(ends_N[num_resident - 1]) if num_resident else 0
    most = everything if pinned_budget is None else min(everything, device_chunks + pinned_budget)
    num_kept = max(num_resident, int(np.searchsorted(ends_N, most, side="right")))
    host_chunks = int(ends_N[num_kept - 1]) - device_chunks if num_kept else 0
    begin_N = ends_N - chunks_N
    begin_N[num_resident:] -= device_chunks
    return Residence(num_resident, num_kept - num_resident, begin_N, device_chunks, host_chunks), staging


class DeviceStore:
    """Items of one dtype and number of dimensions on a device, ready to be gathered. On "cpu" they are in RAM."""

    def __init__(
        self,
        items: Arrays,
        device: str | torch.device,
        *,
        budget_bytes: int | None = None,
        batch_items: int = 0,
        pinned_bytes: int | None = None,
        filled: bool = True,
    ) -> None:
        """Upload `items`.

        `budget_bytes` is the device memory to use (default: 80 % of what is free). `batch_items`, the most items that
        a batch may need, is only required if not all items fit into the budget: room to stage them is reserved.
        `pinned_bytes` is the RAM for those (default: half of what is free); the rest must be streamed
        (`streamed_items`).

        An item that cannot be read (OSError, DecodeError) is blank; pass `unreadable` to the feed, which then replaces
        it.

        With `filled=False` nothing is read: `put` writes each item before a batch needs it. The items must know their
        shapes, and all must fit into the budget.
        """
        self.device = torch.device(device)
        self.unreadable: dict[int, str] = {}
        """Item -> cause of the failure to read it."""
        self._dtype, shapes_ND = _dtype_and_shapes(items, self.unreadable)
        self._chunks_N = chunks_of(shapes_ND.prod(axis=1) * self._dtype.itemsize)
        budget = (free_bytes(self.device) if budget_bytes is None else budget_bytes) // CHUNK_BYTES
        self._items = items
        pinned = free_ram_bytes() if pinned_bytes is None else pinned_bytes
        self.residence, staging = settle(
            self._chunks_N, budget=budget, batch_items=max(1, batch_items), pinned_budget=pinned // CHUNK_BYTES
        )
        if staging and batch_items < 1:
            raise ConfigError(
                f"{_size(self._chunks_N.sum())} of items do not fit into {_size(budget)} on {self.device}: "
                "give batch_items, the most items that a batch needs, so that room is reserved to stage the others."
            )
        if staging > budget:
            raise ResourceError(
                f"A batch of {batch_items} items takes {_size(staging)}, but the budget on {self.device} is only "
                f"{_size(budget)}. Use a smaller batch or a larger budget."
            )
        if not filled and self.residence.num_resident < len(items):
            raise ConfigError(
                f"Items can only be written later if all of them fit into the {_size(budget)} that they may take on "
                f"{self.device}."
            )
        self._memory = _chunk_rows(self.residence.device_chunks + staging, device=self.device)
        host, self._host_device_view = _host_chunks(self.residence.host_chunks, self.device)
        resident = range(self.residence.num_resident)

        def item_or_blank(index: int) -> np.ndarray:
            item = None if index in self.unreadable else _item_or_none(items, index, self.unreadable)
            return np.zeros(shapes_ND[index], self._dtype) if item is None else item

        if filled:
            upload(item_or_blank, resident, self.residence.begin_N, self._chunks_N, self._memory, "to the device")
            pinned_items = range(self.residence.num_resident, self.residence.num_kept)
            upload(item_or_blank, pinned_items, self.residence.begin_N, self._chunks_N, host, "to pinned memory")
        # Also on the device: a batch gathers them there, instead of copying 32 bytes per item from the host.
        self._offset_N = torch.from_numpy(self.residence.begin_N * (CHUNK_BYTES // self._dtype.itemsize)).to(device)
        self._shape_ND = torch.from_numpy(shapes_ND).to(device)
        self._item_bytes_N = shapes_ND.prod(axis=1) * self._dtype.itemsize
        self._put_stream: torch.cuda.Stream | None = None
        if not filled and self.device.type == "cuda":
            self._put_stream = torch.cuda.Stream(self.device)
            # The allocator may return memory that queued work still uses.
            self._put_stream.wait_stream(torch.cuda.current_stream(self.device))
        logger.info("%s%s", self, "" if filled else ", as they are decoded")

    def __len__(self) -> int:
        return len(self._chunks_N)

    def __str__(self) -> str:
        resident = self.residence.num_resident
        each = int(self._chunks_N.mean() * CHUNK_BYTES)
        text = (
            f"{resident} of {len(self)} items on {self.device} ({_size(self.residence.device_chunks)}, {each} B each)"
        )
        if self.residence.num_pinned:
            text += f", {self.residence.num_pinned} staged from pinned memory ({_size(self.residence.host_chunks)})"
        return text + (
            f", {num_streamed} streamed with the batches that need them" if (num_streamed := self.num_streamed) else ""
        )

    @property
    def device_index(self) -> int:
        """Number of the GPU."""
        return self._memory.get_device()

    @property
    def num_streamed(self) -> int:
        """Number of items that are kept neither on the device nor in pinned RAM."""
        return len(self) - self.residence.num_kept

    def put(self, number_K: np.ndarray, row_KW: np.ndarray) -> None:
        """Write items, each from the beginning of its row of bytes; they are there when this returns.

        May be called by one other thread, while kernels read other items. Rows in pinned memory are copied faster.
        """
        memory = self._memory.view(torch.uint8).view(-1)
        begins, sizes = self.residence.begin_N[number_K] * CHUNK_BYTES, self._item_bytes_N[number_K]
        with torch.cuda.stream(self._put_stream):
            for row, begin, size in zip(torch.from_numpy(row_KW), begins.tolist(), sizes.tolist(), strict=True):
                memory[begin : begin + size].copy_(row[:size], non_blocking=True)
        if self._put_stream is not None:
            self._put_stream.synchronize()

    def streamed_items(self) -> StreamedItems | None:
        """For the source: writes the items that must be streamed; None if all items are kept here."""
        if not self.num_streamed:
            return None
        return StreamedItems(self._items, self._chunks_N, first=self.residence.num_kept, chunk_bytes=CHUNK_BYTES)

    def bringing(self) -> StreamedItems | None:
        """The former name of `streamed_items`; to be removed in the next release."""
        warnings.warn("DeviceStore.bringing is now called streamed_items", DeprecationWarning, stacklevel=2)
        return self.streamed_items()

    def sources_of(
        self, items: np.ndarray, device_items: Tensor | None = None, streamed: StreamedChunks | None = None
    ) -> Sources:
        """Make every item of a batch available in device memory, on the current stream; the host does not wait.

        `items` are item numbers in any shape; `device_items` the same numbers on the device, if they are already there.
        `streamed` are the items that are not kept here. Overwrites what an earlier call staged.
        """
        numbers = self.send(items) if device_items is None else device_items
        if self.residence.num_resident == len(self):
            offsets = self._offset_N[numbers]
        else:
            offsets = self.send(self._offsets_with_staging(items, streamed))
        data = self._memory.view(-1).view(torch.from_numpy(np.empty(0, self._dtype)).dtype)
        return Sources(data, offsets, self._shape_ND[numbers])

    def _offsets_with_staging(self, items: np.ndarray, streamed: StreamedChunks | None) -> np.ndarray:
        number_Q = items.reshape(-1)
        begin_Q, staged_to = self.residence.begin_N[number_Q], self.residence.device_chunks
        is_away_Q, is_streamed_Q = number_Q >= self.residence.num_resident, number_Q >= self.residence.num_kept
        for chosen_Q in (is_away_Q & ~is_streamed_Q, is_streamed_Q):
            if not chosen_Q.any():
                continue
            unique, inverse = np.unique(number_Q[chosen_Q], return_inverse=True)
            if chosen_Q is is_streamed_Q:
                rows, begin = self._streamed_rows(unique, streamed)
            else:
                rows, begin = self._host_device_view, self.residence.begin_N[unique]
            begin_Q[chosen_Q] = self._stage(rows, begin, self._chunks_N[unique], staged_to)[inverse]
            staged_to += int(self._chunks_N[unique].sum())
        return np.asarray((begin_Q * (CHUNK_BYTES // self._dtype.itemsize)).reshape(items.shape))

    def _streamed_rows(self, unique: np.ndarray, streamed: StreamedChunks | None) -> tuple[Tensor, np.ndarray]:
        """All chunks streamed with a batch, and where each item of `unique` begins in them.

        ConfigError if nothing was streamed with it.
        """
        if streamed is None:
            raise ConfigError(
                f"Item {unique[0]} is kept neither in device memory nor in pinned RAM, and was not streamed with the "
                "batch: pass what `streamed_items()` returns to the source, or use a larger budget."
            )
        number_B, place_B = np.unique(streamed.number_K, return_index=True)
        chunks_K = self._chunks_N[streamed.number_K]
        begin_K = np.cumsum(chunks_K) - chunks_K
        return streamed.chunks_CW.view(torch.int64), begin_K[place_B[np.searchsorted(number_B, unique)]]

    def _stage(self, rows: Tensor, begin: np.ndarray, counts: np.ndarray, staged_to: int) -> np.ndarray:
        """Copy ranges of rows into the staging chunks, starting at `staged_to`; returns the first chunk of each."""
        ends = np.cumsum(counts)
        room = len(self._memory) - staged_to
        if ends[-1] > room:
            raise ConfigError(
                f"A batch needs {len(counts)} items that are not on the device ({_size(ends[-1])}), but only "
                f"{_size(room)} were reserved for them: use a larger batch_items."
            )
        begins = ends - counts
        # Chunk numbers are computed on the device: there are hundreds per item, and sending them would keep every core
        # busy with copies to pinned memory.
        total = int(ends[-1])
        shift_C = torch.repeat_interleave(self.send(begin - begins), self.send(counts), output_size=total)
        chunk_C = torch.arange(total, device=self.device) + shift_C
        torch.index_select(rows, 0, chunk_C, out=self._memory[staged_to : staged_to + total])
        return np.asarray(staged_to + begins)

    def send(self, array: np.ndarray) -> Tensor:
        """A copy of a small array on the device, on the current stream; the host does not wait."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class _DeviceView:
    """Pinned host memory, exposed under its device address."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows  # keeps the memory alive as long as the view
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(rows.shape),
            "typestr": "<i8",
            "data": (rows.data_ptr(), False),
            "version": 3,
        }


def _host_chunks(num_chunks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the items that stay in RAM, as a host tensor and as a device tensor over the same memory."""
    rows = _chunk_rows(num_chunks, pin_memory=device.type == "cuda" and num_chunks > 0)
    if device.type != "cuda" or not num_chunks:
        return rows, rows
    return rows, torch.as_tensor(_DeviceView(rows), device=device)


def _chunk_rows(num_chunks: int, **where: Any) -> Tensor:
    return torch.empty((num_chunks, CHUNK_BYTES // 8), dtype=torch.int64, **where)


def _item_or_none(items: Arrays, index: int, unreadable: dict[int, str]) -> np.ndarray | None:
    try:
        return read_with_retries(lambda: items[index])
    except UNREADABLE_ERRORS as error:
        unreadable[index] = cause_of(error)
        return None


def _dtype_and_shapes(items: Arrays, unreadable: dict[int, str]) -> tuple[np.dtype, np.ndarray]:
    """The dtype of all items, and the shape of each, int64 [N, D]. Reads every item, unless they know their shapes.

    Those that cannot be read are added to `unreadable` and get another's shape.
    """
    if len(items) == 0:
        raise DataError("There are no items to put on the device. Check the data path.")
    if isinstance(items, ShapedArrays):
        return items.dtype, items.shapes_ND
    shapes: dict[int, tuple[int, ...]] = {}
    first, dtype = 0, np.dtype(np.uint8)
    for index in range(len(items)):
        item = _item_or_none(items, index, unreadable)
        if item is None:
            continue
        if not shapes:
            first, dtype = index, item.dtype
        elif item.dtype != dtype or item.ndim != len(shapes[first]):
            raise DataError(
                f"Item {index} is {item.dtype} with {item.ndim} dimensions, but item {first} is {dtype} with "
                f"{len(shapes[first])}: all items must have the same dtype and number of dimensions."
            )
        shapes[index] = item.shape
    if not shapes:
        raise DataError(f"None of the {len(items)} items can be read; the first: {unreadable[0]}. Check the data set.")
    return dtype, np.array([shapes.get(index, shapes[first]) for index in range(len(items))], np.int64)


def free_bytes(device: torch.device) -> int:
    """Bytes that a store may take on a device if no budget is given: a share of its free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)
    return free_ram_bytes()


def free_ram_bytes() -> int:
    """Bytes of RAM that a store may take if no budget is given: a share of what is free."""
    return int(machine.memory().free * RAM_SHARE)


def _size(num_chunks: int) -> str:
    return f"{num_chunks * CHUNK_BYTES / 1e6:,.1f} MB"
