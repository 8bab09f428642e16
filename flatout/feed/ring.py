"""The ring: slots for batches and a task queue, in shared memory.

    control   queue counters | task table | one cell per worker | stage times, last stages | state of items
    slot 0    head | indices positions shown replaced shapes row counts | field bytes ...
    slot 1    ...
    scratch   one extent per slot for rows of ragged fields, enlarged when a batch has more

The parent publishes tasks (rows of a slot to fill), in one lane for all workers or in one lane per worker. Workers
claim the tasks of their lane one at a time, in order, and never wait for the parent while there is one left. Every
state that a crash could leave ambiguous changes under one lock, which the kernel releases when its holder dies.

The memory is an arena, one file without a name: a memfd or, where that is missing, an unlinked file in /dev/shm or the
temporary folder. Every page is reserved before it is used: if /dev/shm is full, an allocation fails with an error
message, but no process is ever killed by SIGBUS. The kernel frees the arena with the last process that holds it,
however that process ends.

Dimension key:  B rows of a batch   M micro-batches   F fields   N items
"""

import ctypes
import errno
import fcntl
import logging
import math
import mmap
import os
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from flatout.clock import STAGE_DTYPE, TIMELINE_DTYPE
from flatout.errors import DataError, ResourceError
from flatout.feed.plan import Step
from flatout.feed.source import Field, Fields, Rows
from flatout.safefiles import file_size_limit

logger = logging.getLogger(__name__)

PAGE = mmap.ALLOCATIONGRANULARITY

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_MAP_FAILED = ctypes.c_void_p(-1).value


# Shared memory


def page_aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Arena:
    """Extents of shared memory in one growing file; offsets are valid in every process.

    The creator grows it; other processes attach by file descriptor and map an extent on first access.
    Views stay valid after `close()` until they are dropped.
    """

    def __init__(self, fd: int, *, populate: bool = False) -> None:
        """With `populate`, all pages of an extent are faulted in when it is mapped, not one by one on first write."""
        self.fd = fd
        self._flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._maps: dict[int, np.ndarray] = {}
        self._end = 0

    @classmethod
    def create(cls, nbytes: int) -> "Arena":
        """A new arena with a first extent of `nbytes` at offset 0, in the best kind of memory that has room for it."""
        _check_file_size_limit(page_aligned(nbytes))
        for opener in (_open_memfd, partial(_open_unlinked, "/dev/shm"), _open_in_temporary_folder):
            try:
                fd = opener()
            except (OSError, AttributeError):  # not permitted, or a Python built without memfd_create
                continue
            arena = cls(fd)
            try:
                arena.grow(nbytes)
            except ResourceError:
                arena.close()
                continue
            return arena
        raise ResourceError(
            f"The feed's slots need {nbytes / 2**20:.0f} MiB, but neither shared memory nor the temporary folder has "
            "that much room. Use a smaller batch or fewer slots."
        )

    def grow(self, nbytes: int) -> int:
        """Reserve and map a new extent; returns its offset. Raises ResourceError if there is no room."""
        offset, length = self._end, page_aligned(nbytes)
        _check_file_size_limit(offset + length)
        try:
            os.posix_fallocate(self.fd, offset, length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise ResourceError(
                f"Shared memory ran out: {length / 2**20:.0f} MiB more could not be reserved for the feed's slots "
                f"({error.strerror}). Use a smaller batch or fewer slots."
            ) from None
        self._end += length
        self.extent(offset, length)
        return offset

    def extent(self, offset: int, length: int) -> np.ndarray:
        """Bytes [length] of the extent that begins at `offset`, mapped on first use, readable and writable."""
        if offset not in self._maps:
            self._maps[offset] = _map(self.fd, offset, page_aligned(length), self._flags)
        return self._maps[offset][:length]

    def bytes_at(self, offset: int, length: int) -> np.ndarray:
        """Bytes [length] at any offset inside an extent that this process has mapped."""
        begin = max(begin for begin in self._maps if begin <= offset)
        return self._maps[begin][offset - begin : offset - begin + length]

    def discard(self, offset: int) -> None:
        """Return the pages of an extent to the system; it must not be accessed again."""
        memory = self._maps.pop(offset)
        # On a file system that does not support this, the pages stay until the arena is freed.
        _libc.madvise(memory.ctypes.data, memory.nbytes, mmap.MADV_REMOVE)

    @property
    def reserved_bytes(self) -> int:
        """Memory that this arena occupies."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._maps.clear()


def _check_file_size_limit(nbytes: int) -> None:
    limit = file_size_limit()
    if limit is not None and nbytes > limit:
        raise ResourceError(
            f"The feed's slots need {nbytes / 2**20:.1f} MiB, but this process may only write files of up to "
            f"{limit / 2**20:.1f} MiB, shared memory included. Raise the limit: ulimit -f unlimited"
        )


def _map(fd: int, offset: int, length: int, flags: int) -> np.ndarray:
    """Part of a file as a shared mapping, uint8 [length], which lives until the array and its views are dropped.

    mmap.mmap would keep a file descriptor per mapping: a hundred overflowing batches would run out of them.
    """
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"{length} bytes of shared memory could not be mapped")
    memory = (ctypes.c_uint8 * length).from_address(address)
    # Not at exit: the kernel unmaps it then, and another thread may still be writing.
    weakref.finalize(memory, _libc.munmap, address, length).atexit = False
    return np.ctypeslib.as_array(memory)


def _open_memfd() -> int:
    return os.memfd_create("flatout-feed")


def _open_in_temporary_folder() -> int:
    logger.warning(
        "Shared memory is full: batches go through a file in %s, which may cause disk writes. "
        "Give the container a larger /dev/shm, or use backend='thread'.",
        tempfile.gettempdir(),
    )
    return _open_unlinked(tempfile.gettempdir())


def _open_unlinked(folder: str) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


# Slots, tasks and their layout

CACHE_LINE = 64
IDLE = -1
UNKNOWN = -1
READABLE, UNREADABLE, DEADLY = 0, 1, 2
"""States of an item: readable as far as is known; cannot be read; kills the workers that read it."""

TASK_DTYPE = np.dtype([(name, np.int64) for name in ("slot", "begin", "end", "singly", "spill_offset", "spill_bytes")])
CELL_DTYPE = np.dtype([("ticket", np.int64), ("since_ns", np.int64), ("item", np.int64)])
HEAD_DTYPE = np.dtype([(name, np.int64) for name in ("epoch", "num_rows", "scratch_offset", "scratch_bytes", "cursor")])


class Task(NamedTuple):
    """Rows [begin, end) of a slot to fill; with `singly` they are read one by one, to find a bad one.

    A spill is a separate extent for ragged rows that did not fit into the slot's scratch.
    """

    slot: int
    begin: int
    end: int
    singly: bool = False
    spill_offset: int = 0
    spill_bytes: int = 0


class Claim(NamedTuple):
    """A worker's cell: the ticket of its current task, since when, and the item it reads (UNKNOWN if not recorded)."""

    ticket: int
    since_ns: int
    item: int


@dataclass(frozen=True, kw_only=True)
class RingSpec:
    """Everything needed to create or attach to a ring."""

    fields: Fields
    batch_size: int
    micro_batch: int
    num_slots: int
    num_workers: int
    num_items: int
    """Number of samples, or of the items that samples are made of, that may be unreadable. 0: nothing is replaced."""
    num_lanes: int = 1
    """Task queues: 1, shared by all workers, or one per worker."""

    @property
    def tasks_per_slot(self) -> int:
        return -(-self.batch_size // self.micro_batch)

    @property
    def rows_fields(self) -> dict[str, Rows]:
        return {name: field for name, field in self.fields.items() if isinstance(field, Rows)}

    @property
    def fixed_fields(self) -> dict[str, Field]:
        return {name: field for name, field in self.fields.items() if isinstance(field, Field)}

    @property
    def scratch_bytes(self) -> int:
        """Initial size of a slot's scratch: twice the expected rows, plus the gaps between micro-batches."""
        expected = sum(2 * field.expected * field.row_bytes for field in self.rows_fields.values())
        gaps = CACHE_LINE * self.tasks_per_slot * len(self.rows_fields)
        return page_aligned(int(expected * self.batch_size) + gaps)

    @property
    def slot_bytes(self) -> int:
        """Memory that one more slot takes, scratch included."""
        return _slot_layout(self).nbytes + self.scratch_bytes

    @property
    def control_bytes(self) -> int:
        return _control_layout(self).nbytes

    @property
    def fixed_bytes(self) -> int:
        """Control block and slots, without scratch: one extent."""
        return self.control_bytes + self.num_slots * _slot_layout(self).nbytes


class Layout(NamedTuple):
    """Offset, dtype and shape of each named array in a block of memory."""

    parts: dict[str, tuple[int, np.dtype, tuple[int, ...]]]
    nbytes: int

    def views(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: np.ndarray(shape, dtype, memory.data, offset) for name, (offset, dtype, shape) in self.parts.items()
        }


def pack(parts: Iterable[tuple[str, DTypeLike, tuple[int, ...]]]) -> Layout:
    """Lay out arrays one after another, each beginning on a new cache line."""
    placed: dict[str, tuple[int, np.dtype, tuple[int, ...]]] = {}
    end = 0
    for name, dtype, shape in parts:
        placed[name] = (end, np.dtype(dtype), shape)
        nbytes = int(math.prod(shape)) * np.dtype(dtype).itemsize
        end += -(-nbytes // CACHE_LINE) * CACHE_LINE
    return Layout(placed, end)


def _control_layout(spec: RingSpec) -> Layout:
    return pack(
        [
            ("queues", np.int64, (spec.num_lanes, 2)),
            ("tasks", TASK_DTYPE, (spec.num_lanes, spec.num_slots * spec.tasks_per_slot + 1)),
            ("cells", CELL_DTYPE, (spec.num_workers,)),
            ("stages", STAGE_DTYPE, (spec.num_workers, 64)),
            ("timelines", TIMELINE_DTYPE, (spec.num_workers,)),
            ("any_bad", np.bool_, (1,)),
            ("items", np.uint8, (spec.num_items,)),
        ]
    )


def _slot_layout(spec: RingSpec) -> Layout:
    B, M = spec.batch_size, spec.tasks_per_slot
    max_dims = max((len(field.shape) for field in spec.fixed_fields.values()), default=0)
    return pack(
        [
            ("head", HEAD_DTYPE, (1,)),
            ("indices", np.int64, (B,)),
            ("positions", np.int64, (B,)),
            ("shown", np.int64, (B,)),
            ("replaced", np.int32, (B,)),
            ("shapes", np.int64, (len(spec.fixed_fields), max_dims)),
            ("rows_at", np.int64, (M, len(spec.rows_fields))),
            ("done", np.bool_, (M,)),
            *((f"counts {name}", np.int32, (B,)) for name in spec.rows_fields),
            *((f"bytes {name}", np.uint8, (B * field.sample_bytes,)) for name, field in spec.fixed_fields.items()),
        ]
    )


class Slot:
    """Views of one slot."""

    def __init__(self, spec: RingSpec, layout: Layout, memory: np.ndarray) -> None:
        views = layout.views(memory)
        self.head = views["head"][0]
        self.indices = views["indices"]
        self.positions = views["positions"]
        self.shown = views["shown"]
        """The samples that the rows show; `indices` are the samples of the plan."""
        self.replaced = views["replaced"]
        """Number of substituted items in each row."""
        self.rows_at = views["rows_at"]
        self.done = views["done"]
        self.counts = {name: views[f"counts {name}"] for name in spec.rows_fields}
        self._shapes = views["shapes"]
        self._fixed = spec.fixed_fields
        self._bytes = {name: views[f"bytes {name}"] for name in spec.fixed_fields}

    @property
    def num_rows(self) -> int:
        return int(self.head["num_rows"])

    @property
    def is_complete(self) -> bool:
        """Whether every task on this slot is done."""
        return bool(self.done.all())

    def open_for(self, step: Step, num_tasks: int) -> None:
        """Record which samples to fill in; called by the parent before it publishes the tasks."""
        if unknown := step.shapes.keys() - self._fixed.keys():
            raise DataError(
                f"The plan gives a shape for {_quoted(unknown)}, but the source's fields are {_quoted(self._fixed)}. "
                "Give shapes for these only."
            )
        self.head["epoch"] = step.epoch
        self.head["num_rows"] = len(step.indices)
        self.head["cursor"] = 0
        self.done[:] = True
        self.done[:num_tasks] = False
        self.indices[: len(step.indices)] = step.indices
        self.positions[: len(step.positions)] = step.positions
        self.shown[: len(step.indices)] = step.indices
        self.replaced[:] = 0
        for row, (name, field) in enumerate(self._fixed.items()):
            shape = step.shapes.get(name, field.shape)
            _check_step_shape(name, shape, field.shape)
            self._shapes[row, : len(shape)] = shape

    def field(self, name: str) -> np.ndarray:
        """A fixed field of the whole batch, [num_rows, *shape of this step], contiguous."""
        field = self._fixed[name]
        row = list(self._fixed).index(name)
        shape = (self.num_rows, *map(int, self._shapes[row, : len(field.shape)]))
        return np.ndarray(shape, field.dtype, self._bytes[name].data)


# The ring


class Ring:
    """One process's view of the slots and the task queue."""

    def __init__(self, spec: RingSpec, arena: Arena, lock: AbstractContextManager[object]) -> None:
        self.spec = spec
        self.arena = arena
        self._lock = lock
        control, slot = _control_layout(spec), _slot_layout(spec)
        memory = arena.extent(0, spec.fixed_bytes)
        views = control.views(memory)
        self._queues, self._tasks, self._cells = views["queues"], views["tasks"], views["cells"]
        self._tickets = self._cells["ticket"]
        self.stages, self.timelines = views["stages"], views["timelines"]
        self._any_bad, self._items = views["any_bad"], views["items"]
        starts = [control.nbytes + number * slot.nbytes for number in range(spec.num_slots)]
        self.slots = [Slot(spec, slot, memory[start : start + slot.nbytes]) for start in starts]

    @classmethod
    def create(cls, spec: RingSpec, *, shared_by_processes: bool) -> "Ring":
        """A new ring, with all its pages reserved."""
        arena = Arena.create(spec.fixed_bytes)
        ring = cls(spec, arena, KernelLock(arena.fd) if shared_by_processes else threading.Lock())
        ring._cells["ticket"] = IDLE
        try:
            for slot in range(spec.num_slots if spec.rows_fields else 0):
                ring.enlarge_scratch(slot, spec.scratch_bytes)
        except ResourceError:
            ring.close()
            raise
        return ring

    @classmethod
    def attach(cls, spec: RingSpec, fd: int) -> "Ring":
        """The ring that another process created, by its file descriptor."""
        return cls(spec, Arena(fd, populate=True), KernelLock(fd))

    # Called by the parent

    def publish(self, tasks: list[Task], lane: int = 0) -> list[int]:
        """Add tasks to a lane's queue; returns their tickets."""
        queue, table = self._queues[lane], self._tasks[lane]
        with self._lock:
            first = int(queue[0])
            for number, task in enumerate(tasks, start=first):
                table[number % len(table)] = task
            queue[0] = first + len(tasks)
        return [self._ticket(number, lane) for number in range(first, first + len(tasks))]

    def withdraw_unclaimed(self) -> set[int]:
        """Withdraw all unclaimed tasks; returns their tickets."""
        with self._lock:
            queues = self._queues.tolist()
            self._queues[:, 1] = self._queues[:, 0]
        return {
            self._ticket(number, lane)
            for lane, (published, claimed) in enumerate(queues)
            for number in range(claimed, published)
        }

    def num_unclaimed(self) -> list[int]:
        """Number of published but unclaimed tasks in each lane."""
        with self._lock:
            return [published - claimed for published, claimed in self._queues.tolist()]

    def lane_of(self, ticket: int) -> int:
        return ticket % self.spec.num_lanes

    def _ticket(self, number: int, lane: int) -> int:
        return number * self.spec.num_lanes + lane

    def claim_of(self, worker: int) -> Claim | None:
        """The current claim of a worker; None if it has none."""
        with self._lock:
            cell = Claim(*self._cells[worker].tolist())
            # A worker that dies between the last two writes of claim() has claimed nothing.
            claimed = self._queues[self.lane_of(cell.ticket), 1]
            taken = IDLE < cell.ticket < self._ticket(int(claimed), 0)
        return cell if taken else None

    def enlarge_scratch(self, slot: int, nbytes: int) -> None:
        """Give an idle slot a larger scratch."""
        head = self.slots[slot].head
        offset = self.arena.grow(nbytes)
        if head["scratch_bytes"]:
            self.arena.discard(int(head["scratch_offset"]))
        head["scratch_offset"], head["scratch_bytes"] = offset, page_aligned(nbytes)

    # Called by workers

    def claim(self, worker: int) -> tuple[int, Task] | None:
        """Claim the next task of the worker's lane; returns its ticket and the task, None if there is none."""
        lane = worker % self.spec.num_lanes
        queue, table = self._queues[lane], self._tasks[lane]
        with self._lock:
            published, number = map(int, queue)
            if number == published:
                return None
            ticket, task = self._ticket(number, lane), Task(*table[number % len(table)].tolist())
            # Once the queue advances, the cell of a worker that died halfway through this would look like a claim.
            self._tickets[self._tickets == ticket] = IDLE
            self._cells[worker] = (ticket, time.monotonic_ns(), UNKNOWN)
            queue[1] = number + 1
        return ticket, task

    def note_item(self, worker: int, item: int) -> None:
        """Record that this worker now reads `item`, and restart its watchdog time."""
        cell = self._cells[worker]
        cell["item"] = item
        cell["since_ns"] = time.monotonic_ns()

    def finish(self, task: Task) -> bool:
        """Mark a task as done; True if that completes its slot."""
        slot = self.slots[task.slot]
        with self._lock:  # if two workers finish at the same time, one of them must see both
            slot.done[self.micro_batch_of(task)] = True
            return slot.is_complete

    def micro_batch_of(self, task: Task) -> int:
        """Index of the micro-batch, within its slot, that a task fills."""
        return task.begin // self.spec.micro_batch

    def is_done(self, task: Task) -> bool:
        return bool(self.slots[task.slot].done[self.micro_batch_of(task)])

    def release(self, worker: int) -> None:
        """Mark a worker as idle."""
        self._cells[worker]["ticket"] = IDLE

    def reserve(self, slot: int, nbytes: int) -> int | None:
        """Reserve `nbytes` in a slot's scratch; returns the offset, or None if the scratch is full."""
        head = self.slots[slot].head
        with self._lock:
            cursor = int(head["cursor"])
            if cursor + nbytes > head["scratch_bytes"]:
                return None
            head["cursor"] = cursor + nbytes
        # Maps it on first use: the parent may have enlarged the scratch since the last task.
        self.arena.extent(int(head["scratch_offset"]), int(head["scratch_bytes"]))
        return int(head["scratch_offset"]) + cursor

    # Called by both

    def mark(self, item: int, state: int) -> None:
        """Mark `item` as UNREADABLE or DEADLY, so that no worker reads it again."""
        # One byte per item, which only increases: no lock is needed.
        self._items[item] = max(int(self._items[item]), state)
        self._any_bad[0] = True

    def bad_items(self) -> np.ndarray | None:
        """Which items are marked, bool [N], a copy; None if there are none."""
        return self._items != READABLE if self._any_bad[0] else None

    def deadly_items(self) -> list[int]:
        return list(map(int, np.flatnonzero(self._items == DEADLY)))

    def close(self) -> None:
        self.arena.close()


class KernelLock:
    """A lock between processes that the kernel releases when its holder dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *exc_info: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def holder(self) -> int | None:
        """Process id of the other process that holds the lock; None if there is none."""
        layout = "hhqqi4x"  # struct flock: type, whence, start, length, process
        asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, pid = struct.unpack(layout, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _check_step_shape(name: str, shape: tuple[int, ...], largest: tuple[int, ...]) -> None:
    if len(shape) != len(largest) or any(side < 1 or side > limit for side, limit in zip(shape, largest, strict=True)):
        raise DataError(
            f"The plan gives field '{name}' the shape {tuple(shape)}, but the source allows at most {tuple(largest)}. "
            "Use a smaller shape, or declare a larger one in `fields`."
        )
