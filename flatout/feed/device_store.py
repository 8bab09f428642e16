"""Decoded arrays kept where batches are rendered: in device memory, and what does not fit in pinned RAM.

All items lie in one flat buffer, each from an offset on; a render function gathers from it. Items
that stay in RAM are staged into the end of that buffer when a batch needs them, by one gather that
reads the pinned memory across the bus. That takes the same few microseconds of the host whatever the
number of items, and is faster than a copy per item (bench/device_feed.py).

Dimension key:  N items   D dimensions of an item   Q items of a batch   K chunks
"""

import logging
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError, DataError, ResourceError
from flatout.feed.upload import Arrays, upload
from flatout.profiler import machine

logger = logging.getLogger(__name__)

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


class Residence(NamedTuple):
    """Which items lie where: the first ones on the device, the others in RAM. Sizes in chunks."""

    num_resident: int
    begin_N: np.ndarray
    """First chunk of each item, in its own place."""

    device_chunks: int
    host_chunks: int


def chunks_of(bytes_N: np.ndarray) -> np.ndarray:
    """Chunks that items of so many bytes take, int64 [N]."""
    return np.asarray(-(-bytes_N // CHUNK_BYTES))


def settle(chunks_N: np.ndarray, *, budget: int, batch_items: int) -> tuple[Residence, int]:
    """Items on the device, in order, as many as the budget holds, and the chunks kept for staging the others."""
    everything = int(chunks_N.sum())
    staging = 0 if everything <= budget else int(np.sort(chunks_N)[-batch_items:].sum())
    ends_N = np.cumsum(chunks_N)
    num_resident = int(np.searchsorted(ends_N, budget - staging, side="right"))
    device_chunks = int(ends_N[num_resident - 1]) if num_resident else 0
    begin_N = ends_N - chunks_N
    begin_N[num_resident:] -= device_chunks
    return Residence(num_resident, begin_N, device_chunks, everything - device_chunks), staging


class DeviceStore:
    """Items of one dtype and rank on a device, ready to be gathered from. On "cpu" they lie in memory."""

    def __init__(
        self, items: Arrays, device: str | torch.device, *, budget_bytes: int | None = None, batch_items: int = 0
    ) -> None:
        """Upload `items`.

        `budget_bytes` of device memory (default: 80 % of what is free). `batch_items`, the most items a
        batch may need, is wanted only if the budget does not hold all of them: room to stage them is kept.
        """
        self.device = torch.device(device)
        self._dtype, shapes_ND = _dtype_and_shapes(items)
        self._chunks_N = chunks_of(shapes_ND.prod(axis=1) * self._dtype.itemsize)
        budget = (free_bytes(self.device) if budget_bytes is None else budget_bytes) // CHUNK_BYTES
        self.residence, staging = settle(self._chunks_N, budget=budget, batch_items=max(1, batch_items))
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
        self._host, self._host_seen_by_device = _host_chunks(self.residence.host_chunks, self.device)
        resident = range(self.residence.num_resident)
        upload(items, resident, self.residence.begin_N, self._chunks_N, self._memory, "to the device")
        rest = range(self.residence.num_resident, len(self))
        upload(items, rest, self.residence.begin_N, self._chunks_N, self._host, "to pinned memory")
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
        away = f", {len(self) - resident} staged from pinned memory ({_size(self.residence.host_chunks)})"
        return text + (away if resident < len(self) else "")

    def sources_of(self, items: np.ndarray, device_items: Tensor | None = None) -> Sources:
        """Have every item of a batch in device memory, on the current stream; the host does not wait.

        `items` holds item numbers in any shape; `device_items` the same ones on the device, where they are there
        already. What an earlier call staged is void.
        """
        numbers = self.send(items) if device_items is None else device_items
        if self.residence.num_resident == len(self):
            offsets = self._offset_N[numbers]
        else:
            offsets = self.send(self._offsets_with_staging(items))
        data = self._memory.view(-1).view(torch.from_numpy(np.empty(0, self._dtype)).dtype)
        return Sources(data, offsets, self._shape_ND[numbers])

    def _offsets_with_staging(self, items: np.ndarray) -> np.ndarray:
        begin_Q = self.residence.begin_N[items.reshape(-1)]
        away_Q = items.reshape(-1) >= self.residence.num_resident
        if away_Q.any():
            begin_Q[away_Q] = self._stage(items.reshape(-1)[away_Q])
        return np.asarray((begin_Q * (CHUNK_BYTES // self._dtype.itemsize)).reshape(items.shape))

    def _stage(self, away: np.ndarray) -> np.ndarray:
        """Copy items from RAM to the staging chunks; returns the chunk at which each begins there."""
        unique, inverse = np.unique(away, return_inverse=True)
        counts = self._chunks_N[unique]
        ends = np.cumsum(counts)
        room = len(self._memory) - self.residence.device_chunks
        if ends[-1] > room:
            raise ConfigError(
                f"A batch needs {len(unique)} items from pinned memory ({_size(ends[-1])}), but room was kept for "
                f"{_size(room)}: give a larger batch_items."
            )
        begins = ends - counts
        # Ranges of chunks are listed on the device: there are hundreds for each item, and sending them would keep
        # every core busy with copies to pinned memory.
        total, away_by = int(ends[-1]), self.residence.begin_N[unique] - begins
        shift_K = torch.repeat_interleave(self.send(away_by), self.send(counts), output_size=total)
        chunk_K = torch.arange(total, device=self.device) + shift_K
        staged = self._memory[self.residence.device_chunks :][:total]
        torch.index_select(self._host_seen_by_device, 0, chunk_K, out=staged)
        return np.asarray(self.residence.device_chunks + begins[inverse])

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
    free = machine.memory().free
    if num_chunks * CHUNK_BYTES > free * RAM_SHARE:
        raise ResourceError(
            f"{_size(num_chunks)} of items do not fit on {device} and would take more than half of the "
            f"{free / 1e9:.1f} GB of free RAM. Use a larger device budget, smaller items or fewer of them."
        )
    rows = _chunk_rows(num_chunks, pin_memory=device.type == "cuda" and num_chunks > 0)
    if device.type != "cuda" or not num_chunks:
        return rows, rows
    return rows, torch.as_tensor(_SeenByDevice(rows), device=device)


def _chunk_rows(num_chunks: int, **where: Any) -> Tensor:
    return torch.empty((num_chunks, CHUNK_BYTES // 8), dtype=torch.int64, **where)


def _dtype_and_shapes(items: Arrays) -> tuple[np.dtype, np.ndarray]:
    """What all items have in common, and the shape of each, int64 [N, D]."""
    if len(items) == 0:
        raise DataError("There are no items to keep on the device. Check the data path.")
    dtype, rank = items[0].dtype, items[0].ndim
    shapes_ND = np.empty((len(items), rank), np.int64)
    for index in range(len(items)):
        item = items[index]
        if item.dtype != dtype or item.ndim != rank:
            raise DataError(
                f"Item {index} is {item.dtype} with {item.ndim} dimensions, item 0 is {dtype} with {rank}: "
                "one dtype and rank for all."
            )
        shapes_ND[index] = item.shape
    return dtype, shapes_ND


def free_bytes(device: torch.device) -> int:
    """What a store may take on a device if no budget is given."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)
    return int(machine.memory().free * RAM_SHARE)


def _size(num_chunks: int) -> str:
    return f"{num_chunks * CHUNK_BYTES / 1e6:,.1f} MB"
