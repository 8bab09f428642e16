"""Decoded arrays kept where batches are rendered: in device memory, and what does not fit in pinned RAM.

All items lie in one flat buffer, each from an offset on; a render function gathers from it. Items that stay in RAM are
staged into the end of that buffer when a batch needs them, by one gather that reads the pinned memory across the bus.
That takes the same few microseconds of the host whatever the number of items, and is faster than a copy per item
(bench/device_feed.py). What fits into neither memory stays where it is, and batches bring it along (see `brought`).

Dimension key:  N items   D dimensions of an item   Q items of a batch   K items that are brought   C chunks
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.clock import machine
from flatout.errors import ConfigError, DataError, ResourceError
from flatout.feed.batch import Arrays, ShapedArrays
from flatout.feed.source import UNREADABLE_ERRORS, read_patiently
from flatout.feed.streamed_items import StreamedItems
from flatout.feed.worker import cause_of
from flatout.progress import progress

logger = logging.getLogger(__name__)

# Arrays into one flat buffer, on the host or a device, by several threads, with a progress bar.

BLOCK_CHUNKS = 1 << 16


def upload(
    arrays: Arrays, numbers: range, begin_N: np.ndarray, chunks_N: np.ndarray, target: Tensor, name: str
) -> None:
    """Write arrays `numbers` to the rows (chunks) of `target` from begin_N on; blocks until they are there."""
    on_device = target.device.type == "cuda"
    with progress(name, len(numbers)) as advance, ThreadPoolExecutor(4) as pool:
        for group in _blocks(numbers, chunks_N):
            begin, end = int(begin_N[group[0]]), int(begin_N[group[-1]] + chunks_N[group[-1]])
            rows = target[begin:end]
            # The allocator hands a pinned block out again only when its copy has ended, so the
            # threads fill the next block while this one is on its way.
            block = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True) if on_device else rows
            starts = (begin_N[group.start : group.stop] - begin) * rows.shape[1] * rows.element_size()
            list(pool.map(_Placing(arrays, block), group, starts.tolist()))
            if on_device:
                rows.copy_(block, non_blocking=True)
            advance(
                group.stop - numbers.start, (end - int(begin_N[numbers.start])) * rows.shape[1] * rows.element_size()
            )
    if on_device:
        torch.cuda.current_stream(target.device).synchronize()


class _Placing:
    """Writes one array into a block, at a byte."""

    def __init__(self, arrays: Arrays, block: Tensor) -> None:
        self._arrays = arrays
        self._bytes = block.view(-1).view(torch.uint8).numpy()

    def __call__(self, index: int, start: int) -> None:
        array = np.ascontiguousarray(self._arrays[index])
        self._bytes[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)


def _blocks(numbers: range, chunks_N: np.ndarray) -> Iterator[range]:
    """Consecutive items of about BLOCK_CHUNKS together, at least one each."""
    begin, size = numbers.start, 0
    for index in numbers:
        if size and size + chunks_N[index] > BLOCK_CHUNKS:
            yield range(begin, index)
            begin, size = index, 0
        size += int(chunks_N[index])
    if begin < numbers.stop:
        yield range(begin, numbers.stop)


CHUNK_BYTES = 1024
"""Items begin on chunks, and staging moves whole chunks."""
DEVICE_SHARE, RAM_SHARE = 0.8, 0.5
"""Of the free memory, what a store may take if no budget is given."""


class Sources(NamedTuple):
    """The items of a batch, for a render function; everything on the device."""

    data: Tensor
    """[E], all items in one row, in the items' dtype."""

    offsets: Tensor
    """int64, shaped like the batch's item numbers: where in `data` each item begins."""

    shapes: Tensor
    """int64 [..., D], the shape of each item."""


class Brought(NamedTuple):
    """Items that came with a batch; one may be there more than once."""

    number_K: np.ndarray
    """int, on the host."""
    chunks_CW: Tensor
    """uint8, on the device: the chunks of all K items, one after the other."""


class Residence(NamedTuple):
    """Which items lie where: the first ones on the device, then some in pinned RAM. Sizes in chunks."""

    num_resident: int
    num_pinned: int
    begin_N: np.ndarray
    """First chunk of each item, in its own place; what is brought has none."""

    device_chunks: int
    host_chunks: int
    """Of the pinned ones."""

    @property
    def num_kept(self) -> int:
        """Items from this number on are brought by the batches."""
        return self.num_resident + self.num_pinned


def chunks_of(bytes_N: np.ndarray) -> np.ndarray:
    """Chunks that items of so many bytes take, int64 [N]."""
    return np.asarray(-(-bytes_N // CHUNK_BYTES))


def settle(
    chunks_N: np.ndarray, *, budget: int, batch_items: int, pinned_budget: int | None = None
) -> tuple[Residence, int]:
    """Items on the device, in order, as many as the budget holds, and the chunks kept for staging the others.

    Of those, as many are pinned as the other budget holds; None: all.
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
    """Items of one dtype and rank on a device, ready to be gathered from. On "cpu" they lie in memory."""

    def __init__(
        self,
        items: Arrays,
        device: str | torch.device,
        *,
        budget_bytes: int | None = None,
        batch_items: int = 0,
        pinned_bytes: int | None = None,
    ) -> None:
        """Upload `items`.

        `budget_bytes` of device memory (default: 80 % of what is free). `batch_items`, the most items a
        batch may need, is wanted only if the budget does not hold all of them: room to stage them is kept.
        `pinned_bytes` of RAM for those (default: half of what is free); what exceeds it is left to `bringing`.

        An item that cannot be read (OSError, DecodeError) is blank; give `unreadable` to the feed, which then does
        without it.
        """
        self.device = torch.device(device)
        self.unreadable: dict[int, str] = {}
        """Item -> why it could not be read."""
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
                "give batch_items, the most items a batch needs, so that room is kept to stage the others."
            )
        if staging > budget:
            raise ResourceError(
                f"A batch of {batch_items} items takes {_size(staging)}, but only {_size(budget)} of {self.device} "
                "may be used. Use a smaller batch or a larger budget."
            )
        self._memory = _chunk_rows(self.residence.device_chunks + staging, device=self.device)
        host, self._host_seen_by_device = _host_chunks(self.residence.host_chunks, self.device)
        resident = range(self.residence.num_resident)
        readable = _OrBlank(items, self._dtype, shapes_ND, self.unreadable)
        upload(readable, resident, self.residence.begin_N, self._chunks_N, self._memory, "to the device")
        pinned_items = range(self.residence.num_resident, self.residence.num_kept)
        upload(readable, pinned_items, self.residence.begin_N, self._chunks_N, host, "to pinned memory")
        # On the device as well: a batch then gathers them there, instead of being sent 32 bytes per item.
        self._offset_N = torch.from_numpy(self.residence.begin_N * (CHUNK_BYTES // self._dtype.itemsize)).to(device)
        self._shape_ND = torch.from_numpy(shapes_ND).to(device)
        logger.info("%s", self)

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
        return text + (f", {num_away} brought by the batches that need them" if (num_away := self.num_away) else "")

    @property
    def num_away(self) -> int:
        """Items that are kept in neither memory."""
        return len(self) - self.residence.num_kept

    def bringing(self) -> StreamedItems | None:
        """What a source needs to write the items that are not kept here; None where all are."""
        if not self.num_away:
            return None
        return StreamedItems(self._items, self._chunks_N, first=self.residence.num_kept, chunk_bytes=CHUNK_BYTES)

    def sources_of(
        self, items: np.ndarray, device_items: Tensor | None = None, brought: Brought | None = None
    ) -> Sources:
        """Have every item of a batch in device memory, on the current stream; the host does not wait.

        `items` holds item numbers in any shape; `device_items` the same ones on the device, where they are there
        already. `brought` are those that are not kept here. What an earlier call staged is void.
        """
        numbers = self.send(items) if device_items is None else device_items
        if self.residence.num_resident == len(self):
            offsets = self._offset_N[numbers]
        else:
            offsets = self.send(self._offsets_with_staging(items, brought))
        data = self._memory.view(-1).view(torch.from_numpy(np.empty(0, self._dtype)).dtype)
        return Sources(data, offsets, self._shape_ND[numbers])

    def _offsets_with_staging(self, items: np.ndarray, brought: Brought | None) -> np.ndarray:
        number_Q = items.reshape(-1)
        begin_Q, staged_to = self.residence.begin_N[number_Q], self.residence.device_chunks
        is_away_Q, is_brought_Q = number_Q >= self.residence.num_resident, number_Q >= self.residence.num_kept
        for chosen_Q in (is_away_Q & ~is_brought_Q, is_brought_Q):
            if not chosen_Q.any():
                continue
            unique, inverse = np.unique(number_Q[chosen_Q], return_inverse=True)
            if chosen_Q is is_brought_Q:
                rows, begin = self._brought_rows(unique, brought)
            else:
                rows, begin = self._host_seen_by_device, self.residence.begin_N[unique]
            begin_Q[chosen_Q] = self._stage(rows, begin, self._chunks_N[unique], staged_to)[inverse]
            staged_to += int(self._chunks_N[unique].sum())
        return np.asarray((begin_Q * (CHUNK_BYTES // self._dtype.itemsize)).reshape(items.shape))

    def _brought_rows(self, unique: np.ndarray, brought: Brought | None) -> tuple[Tensor, np.ndarray]:
        """The chunks that came with a batch, and where these items begin among them."""
        if brought is None:
            raise ConfigError(
                f"Item {unique[0]} is kept in neither device memory nor pinned RAM, and did not come with the batch: "
                "give the source what `bringing()` returns, or a larger budget."
            )
        number_B, place_B = np.unique(brought.number_K, return_index=True)
        chunks_K = self._chunks_N[brought.number_K]
        begin_K = np.cumsum(chunks_K) - chunks_K
        return brought.chunks_CW.view(torch.int64), begin_K[place_B[np.searchsorted(number_B, unique)]]

    def _stage(self, rows: Tensor, begin: np.ndarray, counts: np.ndarray, staged_to: int) -> np.ndarray:
        """Copy ranges of rows to the staging chunks from `staged_to` on; returns the chunk at which each begins."""
        ends = np.cumsum(counts)
        room = len(self._memory) - staged_to
        if ends[-1] > room:
            raise ConfigError(
                f"A batch needs {len(counts)} items that are not on the device ({_size(ends[-1])}), but room was kept "
                f"for {_size(room)}: give a larger batch_items."
            )
        begins = ends - counts
        # Ranges of chunks are listed on the device: there are hundreds for each item, and sending them would keep
        # every core busy with copies to pinned memory.
        total = int(ends[-1])
        shift_C = torch.repeat_interleave(self.send(begin - begins), self.send(counts), output_size=total)
        chunk_C = torch.arange(total, device=self.device) + shift_C
        torch.index_select(rows, 0, chunk_C, out=self._memory[staged_to : staged_to + total])
        return np.asarray(staged_to + begins)

    def send(self, array: np.ndarray) -> Tensor:
        """A copy of a small array on the device, on the current stream; the host does not wait."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class _SeenByDevice:
    """Pinned host memory under the address at which the device sees it."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows  # kept alive with the view
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(rows.shape),
            "typestr": "<i8",
            "data": (rows.data_ptr(), False),
            "version": 3,
        }


def _host_chunks(num_chunks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the items that stay in RAM, as the host and as the device sees it."""
    rows = _chunk_rows(num_chunks, pin_memory=device.type == "cuda" and num_chunks > 0)
    if device.type != "cuda" or not num_chunks:
        return rows, rows
    return rows, torch.as_tensor(_SeenByDevice(rows), device=device)


def _chunk_rows(num_chunks: int, **where: Any) -> Tensor:
    return torch.empty((num_chunks, CHUNK_BYTES // 8), dtype=torch.int64, **where)


class _OrBlank:
    """Items, and zeros in place of those that cannot be read, which are noted in `unreadable`."""

    def __init__(self, items: Arrays, dtype: np.dtype, shapes_ND: np.ndarray, unreadable: dict[int, str]) -> None:
        self._items, self._dtype, self._shapes_ND = items, dtype, shapes_ND
        self._unreadable = unreadable

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> np.ndarray:
        item = None if index in self._unreadable else _item_or_none(self._items, index, self._unreadable)
        return np.zeros(self._shapes_ND[index], self._dtype) if item is None else item


def _item_or_none(items: Arrays, index: int, unreadable: dict[int, str]) -> np.ndarray | None:
    try:
        return read_patiently(lambda: items[index])
    except UNREADABLE_ERRORS as error:
        unreadable[index] = cause_of(error)
        return None


def _dtype_and_shapes(items: Arrays, unreadable: dict[int, str]) -> tuple[np.dtype, np.ndarray]:
    """What all items have in common, and the shape of each, int64 [N, D]; of an unreadable one any."""
    if len(items) == 0:
        raise DataError("There are no items to keep on the device. Check the data path.")
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
                f"Item {index} is {item.dtype} with {item.ndim} dimensions, item {first} is {dtype} with "
                f"{len(shapes[first])}: one dtype and rank for all."
            )
        shapes[index] = item.shape
    if not shapes:
        raise DataError(f"None of {len(items)} items can be read; the first: {unreadable[0]}. Check the data set.")
    return dtype, np.array([shapes.get(index, shapes[first]) for index in range(len(items))], np.int64)


def free_bytes(device: torch.device) -> int:
    """What a store may take on a device if no budget is given."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)
    return free_ram_bytes()


def free_ram_bytes() -> int:
    """What a store may take of RAM if no budget is given."""
    return int(machine.memory().free * RAM_SHARE)


def _size(num_chunks: int) -> str:
    return f"{num_chunks * CHUNK_BYTES / 1e6:,.1f} MB"
