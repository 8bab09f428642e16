"""The bytes of a store: one portable file that NumPy and mmap can read, on disk or in memory.

    page 0      magic, version, length of the JSON header, SHA-256 of header and index | header
    page 1 ...  index: one ENTRY per item
    page k ...  data: the items, each from a multiple of 64 bytes on

All little-endian, C order. Nothing is trusted: what does not fit together is a StoreFileError, which means "build it
anew". The SHA-256 covers header and index; each item has a CRC-32 of its own, because hashing all data at every start
would take longer than it saves. CRC-32 finds what disks do to bytes, and is 3 to 4 times as fast as BLAKE2.

What a store keeps: anything whose items decode to arrays.
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
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from flatout.errors import ConfigError, DataError
from flatout.feed.config import plan_workers

KINDS = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<f4"))
"""Element types a store keeps; their position is their code in a store file."""
MOST_DIMS = 6


class Items(Protocol):
    """Input files and how to decode them. Plain attributes only: it is pickled for workers.

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
        """Everything but the input files that decides what `decode` returns: sizes, colours, decoder, your version."""

    def __len__(self) -> int: ...

    def path(self, index: int) -> str:
        """The input file of an item; several items may come from one file."""

    def decode(self, index: int) -> np.ndarray:
        """uint8, uint16 or float32 of any shape up to 6 dimensions; the same for every call.

        Raises OSError or DecodeError for a file that cannot be read; anything else counts as a bug.
        """

    def where(self, index: int) -> str:
        """The file (or key) of an item, for error texts."""


def decode_item(items: Items, index: int) -> np.ndarray:
    """An item as every store hands it out: read-only, contiguous, little-endian; refuses what no store can keep."""
    array = np.asarray(items.decode(index), order="C")
    kind = array.dtype.newbyteorder("<")
    if kind not in KINDS or array.ndim > MOST_DIMS:
        raise DataError(
            f"{items.where(index)}: decode() returned {array.dtype} {array.shape}. A store keeps uint8, uint16 or "
            f"float32 of up to {MOST_DIMS} dimensions: convert it in decode()."
        )
    array = array.astype(kind, copy=False).view()
    array.flags.writeable = False
    return array


# How a store is kept: every knob, none of which changes what it returns.


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How a store is kept. None of this changes what it returns."""

    place: Literal["ram", "disk", "off"] = "ram"
    """In memory for the length of a run, in a file that later runs find again, or nowhere."""

    budget_bytes: int | None = None
    """What it may take in all. None: half of the free memory, or 90 % of the free disk."""

    folder: str | Path | None = None
    """Where files, locks and records are. None: flatout/stores in the user's cache folder."""

    policy: Literal["resident", "lru"] = "resident"
    """What happens when the budget is too small: the first items stay and the others are decoded on every visit, or
    each process keeps those it used last (worse for shuffled epochs, see docs/store.md)."""

    workers: int | str = "auto"
    """Who decodes when it is built, as in FeedConfig. With policy="lru", the processes that share the budget."""

    backend: Literal["process", "thread"] = "process"
    """Threads need no pickling, but only pay off if `decode` releases the GIL."""

    verify: bool = False
    """Compare every stored byte and every input file with the checksums taken at build before using a store."""

    patience_s: float = 120
    """Another process that is building the same store is not waited for when it makes no progress for so long."""

    progress: bool = True
    """Show how far a build is."""

    def __post_init__(self) -> None:
        for name, known in {
            "place": ("ram", "disk", "off"),
            "policy": ("resident", "lru"),
            "backend": ("process", "thread"),
        }.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: use {' or '.join(map(repr, known))}.")
        if self.policy == "lru" and self.place == "disk":
            raise ConfigError("policy='lru' keeps items in each process's memory: use it with place='ram'.")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ConfigError(f"budget_bytes={self.budget_bytes} must not be negative.")
        if self.patience_s < 0:
            raise ConfigError(f"patience_s={self.patience_s} must not be negative.")
        plan_workers(self.workers)  # refuses what cannot be obeyed

    @property
    def num_workers(self) -> int:
        """Workers on this machine."""
        return plan_workers(self.workers).total


MAGIC = b"FLATOUTS"
VERSION = 1
PAGE = 4096
ALIGNMENT = 64
HEAD = struct.Struct("<8sII32s")

ABSENT, HERE, UNREADABLE = 0, 1, 2
"""States of an item: left out for lack of room, stored, or impossible to decode when the store was built."""

ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("shape", "<u8", (MOST_DIMS,)),
        ("crc", "<u4"),  # of the stored bytes
        ("source_crc", "<u4"),  # of the whole input file
        ("state", "u1"),
        ("kind", "u1"),  # position in KINDS
        ("ndim", "u1"),
        ("padding", "u1", (5,)),
    ]
)


class StoreFileError(Exception):
    """Not a store, or not a whole one; the text says why."""


class Header(NamedTuple):
    """What the file says about itself."""

    state: str
    """StoreKey.state of the items."""
    num_items: int
    nbytes: int
    """Length of the whole file."""
    budget_bytes: int
    """What it was asked to take at most; 0 if nothing was left out."""
    stopped_by: str
    """Why items were left out: "" (none were), "budget" or "no room"."""


class StoreFile:
    """A complete store, mapped read-only; views stay valid after `close()` until they are dropped."""

    def __init__(self, fd: int) -> None:
        """Owns `fd` from now on, also if this raises StoreFileError."""
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)
        nbytes = os.fstat(fd).st_size
        if nbytes < PAGE:
            raise StoreFileError(f"it has only {nbytes} bytes")
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.header = _read_header(self._map)
        self.index = _read_index(self._map, self.header)
        _check_index(self.index, self.header)

    def __len__(self) -> int:
        return self.header.num_items

    def holds(self, index: int) -> bool:
        return bool(self.index["state"][index] == HERE)

    def view(self, index: int) -> np.ndarray:
        """Read-only array of an item that is here; the file's own memory, not a copy."""
        entry = self.index[index]
        kind, ndim = KINDS[entry["kind"]], int(entry["ndim"])
        count = int(entry["nbytes"]) // kind.itemsize
        flat = np.frombuffer(self._map, kind, count, int(entry["offset"])) if count else _nothing(kind)
        return flat.reshape(entry["shape"][:ndim].tolist())

    def is_intact(self, index: int) -> bool:
        """Whether an item's bytes are those that were stored; reads all of them."""
        return crc_of(self.view(index)) == int(self.index["crc"][index])


def describe(array: np.ndarray, source_crc: int) -> np.ndarray:
    """The index entry of an array that `decode_item` made, ENTRY []; its offset is left open."""
    entry = np.zeros((), ENTRY)
    entry["nbytes"], entry["ndim"], entry["kind"] = array.nbytes, array.ndim, KINDS.index(array.dtype)
    entry["shape"][: array.ndim] = array.shape
    entry["state"], entry["crc"], entry["source_crc"] = HERE, crc_of(array), source_crc
    return entry


def crc_of(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def data_offset(num_items: int) -> int:
    """Where the data begins: on the first page after the index."""
    return PAGE + -(-num_items * ENTRY.itemsize // PAGE) * PAGE


def head_and_index(header: Header, index_N: np.ndarray) -> bytes:
    """The bytes before the data."""
    text = json.dumps(header._asdict()).encode()
    index = index_N.astype(ENTRY).tobytes()
    head = HEAD.pack(MAGIC, VERSION, len(text), hashlib.sha256(text + index).digest()) + text
    return head.ljust(PAGE, b"\0") + index


def _read_header(memory: mmap.mmap) -> Header:
    magic, version, length, _ = HEAD.unpack_from(memory)
    if magic != MAGIC:
        raise StoreFileError("it does not begin like one")
    if version != VERSION:
        raise StoreFileError(f"it has format {version}, and this flatout reads format {VERSION}")
    try:
        fields: dict[str, Any] = json.loads(memory[HEAD.size : HEAD.size + length])
        header = Header(**fields)
    except (ValueError, TypeError) as error:
        raise StoreFileError("its header is damaged") from error
    if any(type(value) is not Header.__annotations__[name] for name, value in header._asdict().items()):
        raise StoreFileError("its header is damaged")
    if header.nbytes != len(memory):
        raise StoreFileError(f"it has {len(memory)} of {header.nbytes} bytes")
    return header


def _read_index(memory: mmap.mmap, header: Header) -> np.ndarray:
    if not 0 <= data_offset(header.num_items) <= len(memory):
        raise StoreFileError("its header is damaged")
    _, _, length, digest = HEAD.unpack_from(memory)
    index_N = np.frombuffer(memory, ENTRY, header.num_items, PAGE)
    covered = memory[HEAD.size : HEAD.size + length] + index_N.tobytes()
    if hashlib.sha256(covered).digest() != digest:
        raise StoreFileError("its header or index is damaged")
    return index_N


def _check_index(index_N: np.ndarray, header: Header) -> None:
    """The digest proves that the index is as it was written; this, that it was written for this file."""
    here_M = index_N[index_N["state"] == HERE]
    if not len(here_M):
        return
    inside = (here_M["offset"] >= data_offset(len(index_N))) & (here_M["nbytes"] <= header.nbytes)
    inside &= here_M["offset"] <= header.nbytes - here_M["nbytes"]
    if not inside.all() or here_M["kind"].max() >= len(KINDS) or here_M["ndim"].max() > MOST_DIMS:
        raise StoreFileError("its index points outside")
    used_MD = np.arange(MOST_DIMS) < here_M["ndim"][:, None]
    itemsize_M = np.array([kind.itemsize for kind in KINDS], np.uint64)[here_M["kind"]]
    if (np.where(used_MD, here_M["shape"], 1).prod(axis=1) * itemsize_M != here_M["nbytes"]).any():
        raise StoreFileError("its index has shapes that do not fit their bytes")


def _nothing(kind: np.dtype) -> np.ndarray:
    empty = np.empty(0, kind)
    empty.flags.writeable = False
    return empty


# Writes a store, item after item, into a file or into memory, until everything is in it or there is no more room.

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}


class NoRoomError(Exception):
    """Not even the index fits."""


class StoreWriter:
    """Takes items in any order. Pages are written, never touched through a mapping: a full disk is an error here, not
    a SIGBUS. The file is worth nothing before `finish`."""

    def __init__(self, fd: int, *, num_items: int, limit_bytes: int) -> None:
        self._fd = fd
        self._limit_bytes = limit_bytes
        self._begin = self._end = data_offset(num_items)
        self.index = np.zeros(num_items, ENTRY)
        self.stopped_by = ""
        if self._begin > limit_bytes:
            raise NoRoomError(f"the index alone takes {self._begin} bytes")
        try:
            # Reserved first: what is stored later can be worth nothing for lack of an index.
            os.posix_fallocate(fd, 0, self._begin)
        except OSError as error:
            raise _as_no_room(error) from error

    def add(self, index: int, entry: np.ndarray, data: np.ndarray) -> bool:
        """Store an item's bytes, uint8 [nbytes]; False when the store is full and takes no more."""
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        if self._begin + len(data) > self._limit_bytes:
            return True  # would not fit into an empty store either; others will
        if offset + len(data) > self._limit_bytes:
            self.stopped_by = "budget"
            return False
        try:
            _write_all(self._fd, data, offset)
        except OSError as error:
            _as_no_room(error)
            self.stopped_by = "no room"
            return False
        self.index[index] = entry
        self.index["offset"][index] = offset
        self._end = offset + len(data)
        return True

    def leave_out(self, index: int) -> None:
        """Note an item that cannot be decoded."""
        self.index["state"][index] = UNREADABLE

    @property
    def nbytes(self) -> int:
        return self._end

    def finish(self, *, state: str, budget_bytes: int) -> None:
        """Make a whole store of what has been added; see Header."""
        os.ftruncate(self._fd, self._end)
        # A whole store is the same whatever it was allowed to take, so that two builders agree on every byte.
        budget_bytes = budget_bytes if self.stopped_by else 0
        header = Header(state, len(self.index), self._end, budget_bytes, self.stopped_by)
        _write_all(self._fd, np.frombuffer(head_and_index(header, self.index), np.uint8), 0)


def _write_all(fd: int, data: np.ndarray, offset: int) -> None:
    rest = data.data
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _as_no_room(error: OSError) -> NoRoomError:
    if error.errno not in NO_ROOM:
        raise error
    return NoRoomError(error.strerror)
