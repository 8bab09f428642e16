"""Items and settings of a store, and its file format: one portable file that NumPy and mmap can read.

    page 0      magic, version, length of the JSON header, SHA-256 of header and index | header
    page 1 ...  index: one ENTRY per item
    page k ...  data: the items, each aligned to 64 bytes

The file may be on disk or in memory. Everything is little-endian, in C order. Nothing is trusted: any inconsistency is
a StoreFileError, and the store is rebuilt. The SHA-256 covers header and index; each item has its own CRC-32, because
hashing all data at every start would take longer than the store saves. CRC-32 detects the errors that disks make, and
is 3 to 4 times as fast as BLAKE2.

Dimension key:  N items   M stored items   D dimensions
"""

import errno
import hashlib
import json
import mmap
import os
import struct
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.feed.config import check_choices, plan_workers

DTYPES = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<f4"))
"""Element types of stored arrays; the position is the code in a store file."""
MAX_DIMS = 6


class Items(Protocol):
    """Input files and how to decode them. It is pickled for workers, so attributes must be picklable.

    class Photos:
        parameters = "cv2 BGR, longest side 640"

        def __init__(self, paths): self.paths = paths
        def __len__(self): return len(self.paths)
        def path(self, index): return self.paths[index]
        def where(self, index): return self.paths[index]
        def decode(self, index): return decode_and_shrink(self.paths[index], 640)

    The name of the class is part of a store's key. A class that was renamed keeps its stores by setting the class
    attribute `store_kind` to its former `__qualname__`; subclasses do not inherit it.
    """

    @property
    def parameters(self) -> str:
        """Everything besides the input files that affects what `decode` returns: sizes, colours, decoder, version."""

    def __len__(self) -> int: ...

    def path(self, index: int) -> str:
        """The input file of an item; several items may come from one file."""

    def decode(self, index: int) -> np.ndarray:
        """uint8, uint16 or float32 of any shape up to 6 dimensions; the same for every call.

        Raises OSError or DecodeError for a file that cannot be read; any other exception is a bug.
        """

    def where(self, index: int) -> str:
        """The file (or key) of an item, for error messages."""


def decode_item(items: Items, index: int) -> np.ndarray:
    """Decode an item to a read-only, contiguous, little-endian array; raises DataError if a store cannot keep it."""
    decoded = items.decode(index)
    if decoded is None:  # as cv2.imread does for a file that it cannot read
        raise DataError(
            f"{items.where(index)}: decode() returned None. Raise flatout.DecodeError for a file that cannot be read."
        )
    array = np.asarray(decoded, order="C")
    kind = array.dtype.newbyteorder("<")
    if kind not in DTYPES or array.ndim > MAX_DIMS:
        raise DataError(
            f"{items.where(index)}: decode() returned {array.dtype} {array.shape}, but a store only keeps uint8, "
            f"uint16 or float32 of up to {MAX_DIMS} dimensions. Convert the array in decode()."
        )
    array = array.astype(kind, copy=False).view()
    array.flags.writeable = False
    return array


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Settings of a store. None of them changes the arrays it returns."""

    place: Literal["ram", "disk", "off"] = "ram"
    """In memory for the duration of a run, in a file that later runs find again, or nowhere."""

    budget_bytes: int | None = None
    """Maximum total size. None: half of the free memory, or 90 % of the free disk space."""

    folder: str | Path | None = None
    """Folder of files, locks and records. None: flatout/stores in the user's cache folder."""

    policy: Literal["resident", "lru"] = "resident"
    """What to do when the budget is too small: keep the first items and decode the others on every access, or keep, in
    each process, the items used last (worse for shuffled epochs, see docs/store.md)."""

    workers: int | str = "auto"
    """Workers that decode while the store is built, as in FeedConfig. With policy="lru", the number of processes that
    share the budget."""

    backend: Literal["process", "thread"] = "process"
    """Threads need no pickling, but are only faster if `decode` releases the GIL."""

    verify: bool = False
    """Whether to compare every stored byte and every input file with the checksums of the build before use."""

    patience_s: float = 120
    """Seconds without progress after which another process that is building the same store is no longer waited for."""

    progress: bool = True
    """Whether to show a progress bar while the store is built."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.policy == "lru" and self.place == "disk":
            raise ConfigError("policy='lru' keeps items in each process's memory: use it with place='ram'.")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ConfigError(f"budget_bytes={self.budget_bytes} must not be negative.")
        if self.patience_s < 0:
            raise ConfigError(f"patience_s={self.patience_s} must not be negative.")
        plan_workers(self.workers)  # raises ConfigError for invalid values

    @property
    def num_workers(self) -> int:
        """Workers on this machine."""
        return plan_workers(self.workers).total


# Reading a store

MAGIC = b"FLATOUTS"
VERSION = 1
PAGE = 4096
ALIGNMENT = 64
HEAD = struct.Struct("<8sII32s")

ABSENT, STORED, UNREADABLE = 0, 1, 2
"""States of an item: omitted for lack of room, stored, or not decodable when the store was built."""

ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("shape", "<u8", (MAX_DIMS,)),
        ("crc", "<u4"),  # of the stored bytes
        ("source_crc", "<u4"),  # of the whole input file
        ("state", "u1"),
        ("kind", "u1"),  # position in DTYPES
        ("ndim", "u1"),
        ("padding", "u1", (5,)),
    ]
)


class StoreFileError(Exception):
    """Not a store, or not a complete one; the message says why."""


class StoreHeader(NamedTuple):
    """The JSON header of a store file."""

    state: str
    """StoreKey.state of the items."""
    num_items: int
    nbytes: int
    """Length of the whole file."""
    budget_bytes: int
    """Maximum size that was requested; 0 if nothing was omitted."""
    stopped_by: str
    """Why items were omitted: "" (none were), "budget" or "no room"."""


class StoreFile:
    """A store file that was written completely, mapped read-only; some items may be omitted (`holds`).

    Views stay valid after `close()` until they are dropped.
    """

    def __init__(self, fd: int) -> None:
        """StoreFileError if the file is incomplete or damaged. Takes ownership of `fd`, even then."""
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)
        nbytes = os.fstat(fd).st_size
        if nbytes < PAGE:
            raise StoreFileError(f"it has only {nbytes} bytes")
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.header, self.index = _read_header_and_index(self._map)
        _check_index(self.index, self.header)

    def __len__(self) -> int:
        return self.header.num_items

    def holds(self, index: int) -> bool:
        return bool(self.index["state"][index] == STORED)

    def view(self, index: int) -> np.ndarray:
        """Read-only array of a stored item: a view of the file's memory, not a copy."""
        entry = self.index[index]
        shape = entry["shape"][: int(entry["ndim"])].tolist()
        return np.ndarray(shape, DTYPES[entry["kind"]], self._map, int(entry["offset"]))

    def is_intact(self, index: int) -> bool:
        """Whether an item's bytes match their checksum; reads all of them."""
        return crc_of(self.view(index)) == int(self.index["crc"][index])


def describe(array: np.ndarray, source_crc: int) -> np.ndarray:
    """The index entry of an array from `decode_item`, ENTRY [], without its offset."""
    entry = np.zeros((), ENTRY)
    entry["nbytes"], entry["ndim"], entry["kind"] = array.nbytes, array.ndim, DTYPES.index(array.dtype)
    entry["shape"][: array.ndim] = array.shape
    entry["state"], entry["crc"], entry["source_crc"] = STORED, crc_of(array), source_crc
    return entry


def crc_of(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def data_offset(num_items: int) -> int:
    """Offset of the data: the first page after the index."""
    return PAGE + -(-num_items * ENTRY.itemsize // PAGE) * PAGE


def head_and_index(header: StoreHeader, index_N: np.ndarray) -> bytes:
    """All bytes before the data."""
    text = json.dumps(header._asdict()).encode()
    index = index_N.astype(ENTRY).tobytes()
    head = HEAD.pack(MAGIC, VERSION, len(text), hashlib.sha256(text + index).digest()) + text
    return head.ljust(PAGE, b"\0") + index


def _read_header_and_index(memory: mmap.mmap) -> tuple[StoreHeader, np.ndarray]:
    magic, version, length, digest = HEAD.unpack_from(memory)
    if magic != MAGIC:
        raise StoreFileError("it is not a store file")
    if version != VERSION:
        raise StoreFileError(f"it has format version {version}, but this version of flatout reads {VERSION}")
    text = memory[HEAD.size : HEAD.size + length]
    try:
        header = StoreHeader(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise StoreFileError("its header is damaged") from error
    if any(type(value) is not StoreHeader.__annotations__[name] for name, value in header._asdict().items()):
        raise StoreFileError("its header is damaged")
    if header.nbytes != len(memory):
        raise StoreFileError(f"it has {len(memory)} of {header.nbytes} bytes")
    if not 0 <= data_offset(header.num_items) <= len(memory):
        raise StoreFileError("its header is damaged")
    index_N = np.frombuffer(memory, ENTRY, header.num_items, PAGE)
    if hashlib.sha256(text + index_N.tobytes()).digest() != digest:
        raise StoreFileError("its header or index is damaged")
    return header, index_N


def _check_index(index_N: np.ndarray, header: StoreHeader) -> None:
    """Check that the index fits this file; the digest only proves that it is as it was written."""
    stored_M = index_N[index_N["state"] == STORED]
    if not len(stored_M):
        return
    inside = (stored_M["offset"] >= data_offset(len(index_N))) & (stored_M["nbytes"] <= header.nbytes)
    inside &= stored_M["offset"] <= header.nbytes - stored_M["nbytes"]
    if not inside.all() or stored_M["kind"].max() >= len(DTYPES) or stored_M["ndim"].max() > MAX_DIMS:
        raise StoreFileError("its index points outside the file")
    used_MD = np.arange(MAX_DIMS) < stored_M["ndim"][:, None]
    itemsize_M = np.array([kind.itemsize for kind in DTYPES], np.uint64)[stored_M["kind"]]
    if (np.where(used_MD, stored_M["shape"], 1).prod(axis=1) * itemsize_M != stored_M["nbytes"]).any():
        raise StoreFileError("its index has shapes that do not match their number of bytes")


# Writing a store

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}


class NoRoomError(Exception):
    """Not even the index fits."""


class StoreWriter:
    """Writes items, in any order, into a file on disk or in memory, until there is no more room.

    Pages are written, not accessed through a mapping, so a full disk is an error and not a SIGBUS. The file is not a
    valid store before `finish`.
    """

    def __init__(self, fd: int, *, num_items: int, limit_bytes: int) -> None:
        self._fd = fd
        self._limit_bytes = limit_bytes
        self._begin = self.nbytes = data_offset(num_items)
        self.index = np.zeros(num_items, ENTRY)
        self.stopped_by = ""
        if self._begin > limit_bytes:
            raise NoRoomError(f"the index alone takes {self._begin} bytes")
        try:
            # The index is reserved first: without it, the data would be useless.
            os.posix_fallocate(fd, 0, self._begin)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise NoRoomError(error.strerror) from error

    def add(self, index: int, entry: np.ndarray, data: np.ndarray) -> bool:
        """Store an item's bytes, uint8 [nbytes], and its row of the index, `entry`; False if the store is full.

        True also for an item larger than the whole store, which is left out.
        """
        offset = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        if self._begin + len(data) > self._limit_bytes:
            return True  # too large even for an empty store; other items may still fit
        if offset + len(data) > self._limit_bytes:
            self.stopped_by = "budget"
            return False
        try:
            _write_all(self._fd, data, offset)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.stopped_by = "no room"
            return False
        self.index[index] = entry
        self.index["offset"][index] = offset
        self.nbytes = offset + len(data)
        return True

    def leave_out(self, index: int) -> None:
        """Mark an item as not decodable."""
        self.index["state"][index] = UNREADABLE

    def finish(self, *, state: str, budget_bytes: int) -> None:
        """Write the header and index, which makes the file a valid store; for the arguments see StoreHeader."""
        os.ftruncate(self._fd, self.nbytes)
        # A complete store does not depend on its budget, so that two builders produce the same bytes.
        budget_bytes = budget_bytes if self.stopped_by else 0
        header = StoreHeader(state, len(self.index), self.nbytes, budget_bytes, self.stopped_by)
        _write_all(self._fd, np.frombuffer(head_and_index(header, self.index), np.uint8), 0)


def _write_all(fd: int, data: np.ndarray, offset: int) -> None:
    rest = data.data
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written
