"""Find the store of some items, or build it, in memory or on disk, as far as the room goes.

To build it, a feed decodes the items in parallel, and this process writes them. Items arrive in index order whatever
the number of workers, so a given budget always holds the same subset.
"""

import fcntl
import heapq
import json
import logging
import os
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from flatout.clock import machine
from flatout.feed.config import FeedConfig
from flatout.feed.feed import Feed
from flatout.feed.plan import Plan
from flatout.feed.processes import pickle_for_workers
from flatout.feed.source import DecodeError, Field, Rows, SampleSource
from flatout.feed.store.file import (
    ENTRY,
    STORED,
    UNREADABLE,
    Items,
    NoRoomError,
    StoreConfig,
    StoreFile,
    StoreHeader,
    StoreWriter,
    decode_item,
    describe,
)
from flatout.feed.store.home import StoreLocation, default_folder, key_of
from flatout.feed.worker import cause_of
from flatout.progress import Advance, progress
from flatout.safefiles import read_note

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)

# Verification of a store against its input files; reads every byte of both, so it is only done on request


def first_difference(file: StoreFile, items: Items, *, num_threads: int) -> str:
    """Description of the first item that is damaged or whose input file has changed; "" if there is none."""

    def look_at(index: int) -> str:
        if not file.holds(index):
            return ""
        if not file.is_intact(index):
            return f"the stored bytes of {items.where(index)} are damaged"
        is_same = crc_of_file(items.path(index)) == int(file.index["source_crc"][index])
        return "" if is_same else f"{items.where(index)} is gone or has changed since it was decoded"

    # Threads, because zlib releases the GIL.
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        return next(filter(None, pool.map(look_at, range(len(file)))), "")


def crc_of_file(path: str) -> int:
    """CRC-32 of a file's bytes; 0 if the path is not a file, such as a member of an archive."""
    crc = 0
    with suppress(OSError), open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
        return crc
    return 0


# Decoding all items

Decoded = tuple[np.ndarray, np.ndarray]
"""The index entry of an item, and its bytes: ENTRY [], uint8 [nbytes]."""

BATCH_BYTES = 16 << 20
MAX_PER_BATCH = 256
ITEMS_PROBED = 8
ADVANCE_EVERY = 8
"""Items between two updates of the progress bar."""


class DecodingSource(SampleSource):
    """Each item as bytes, with its index entry; for an item that cannot be decoded, the error message."""

    def __init__(self, items: Items, expected_bytes: int) -> None:
        self.fields = {"entry": Field((), ENTRY), "data": Rows(1, np.uint8, expected=expected_bytes)}
        self._items = items
        self._last_input = "", 0

    def __len__(self) -> int:
        return len(self._items)

    def where(self, index: int) -> str:
        return self._items.where(index)

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        try:
            entry, array = self.decoded(index)
        except (OSError, DecodeError) as error:
            entry = np.zeros((), ENTRY)
            entry["state"] = UNREADABLE
            array = np.frombuffer(cause_of(error).encode(), np.uint8)
        return {"entry": entry, "data": array[:, None]}

    def decoded(self, index: int) -> Decoded:
        """Decode an item; raises if that is not possible."""
        array = decode_item(self._items, index)
        entry = describe(array, self._source_crc(self._items.path(index)))
        return entry, array.reshape(-1).view(np.uint8)

    def _source_crc(self, path: str) -> int:
        if self._last_input[0] != path:  # neighbours often come from one file
            self._last_input = path, crc_of_file(path)
        return self._last_input[1]


def build(items: Items, writer: StoreWriter, config: FeedConfig, advance: Advance) -> None:
    """Decode items in index order until all are written or the writer is full; warns of those that cannot be decoded.

    Every item is decoded only once: those that were decoded first, to find out their size, are written as they are.
    """
    if config.num_workers and config.backend == "process":
        advice = "`decode`, or use StoreConfig(backend='thread') or StoreConfig(workers=0)"
        pickle_for_workers(items, advice=advice)
    known = _probed(items)
    unreadable: dict[int, str] = {}
    for number, (index, outcome) in enumerate(_in_order(items, known, config)):
        if isinstance(outcome, str):
            unreadable[index] = outcome
            writer.leave_out(index)
        elif not writer.add(index, *outcome):
            break
        if number % ADVANCE_EVERY == 0 or index == len(items) - 1:
            advance(index + 1, writer.nbytes)
    _warn_of_unreadable(items, unreadable)


def _in_order(items: Items, known: dict[int, Decoded], config: FeedConfig) -> Iterable[tuple[int, Decoded | str]]:
    """Every item with its decoded data, or the reason why it cannot be decoded; `known` are in order themselves."""
    rest = np.array([index for index in range(len(items)) if index not in known], np.int64)
    expected_bytes = max([BATCH_BYTES // MAX_PER_BATCH, *(len(data) * 5 // 4 for _, data in known.values())])
    return heapq.merge(known.items(), _decoded(items, rest, expected_bytes, config), key=itemgetter(0))


def _decoded(
    items: Items, indices: np.ndarray, expected_bytes: int, config: FeedConfig
) -> Iterator[tuple[int, Decoded | str]]:
    """Some items, decoded by a feed's workers; the yielded data is overwritten afterwards."""
    if not len(indices):
        return
    batch_size = max(1, min(BATCH_BYTES // expected_bytes, len(indices)))
    plan = Plan(num_samples=len(items), batch_size=batch_size, shuffle=False, last="short", order=indices)
    with Feed(DecodingSource(items, expected_bytes), plan, config) as feed:
        for batch in feed:
            ends = np.cumsum(batch.counts["data"]).tolist()
            pieces = np.split(batch["data"].reshape(-1), ends[:-1])
            for row, data in enumerate(pieces):
                index, entry = int(indices[batch.positions[row]]), batch["entry"][row]
                if batch.indices[row] != index:  # replaced, because it killed its workers
                    yield index, feed.bad_samples[index]
                elif entry["state"] == UNREADABLE:
                    yield index, data.tobytes().decode()
                else:
                    yield index, (entry, data)


def _probed(items: Items) -> dict[int, Decoded]:
    """A few items from all over the data set, decoded to estimate the size of an item; unreadable ones left out."""
    source, found = DecodingSource(items, 1), {}
    for index in np.unique(np.linspace(0, len(items) - 1, ITEMS_PROBED).astype(int)).tolist():
        # Not swallowed: the feed decodes the item again, and the error is then reported with it.
        with suppress(Exception):
            found[index] = source.decoded(index)
    return found


def _warn_of_unreadable(items: Items, unreadable: Mapping[int, str]) -> None:
    if unreadable:
        index, cause = next(iter(unreadable.items()))
        logger.warning(
            "%d of %d items could not be decoded and are missing from the store; the first: %s (%s).",
            len(unreadable),
            len(items),
            items.where(index),
            cause,
        )


# The build lock: one process builds a store, the others wait for it, but never forever.
#
# The kernel releases the lock when its holder ends, however that happens. What the kernel cannot know is whether a
# holder on another machine, or one that was stopped, will ever continue. So the holder writes its progress into a note
# beside the lock, and if the note does not change for long enough, the others stop waiting and build for themselves.

NOTE_INTERVAL_S = 1.0
GRACE_S = 0.2
"""Time to wait before the first message: by then the holder has written its note."""


class BuildNote:
    """The progress note of a build; does nothing without a path."""

    def __init__(self, note_path: Path | None) -> None:
        self._note_path = note_path
        self._since = datetime.now().isoformat(" ", "seconds")
        self._noted_s = -NOTE_INTERVAL_S
        self.update(0)

    def update(self, done: int) -> None:
        """Record how many items are done, for the processes that wait; at most once per NOTE_INTERVAL_S."""
        if self._note_path is None or time.monotonic() - self._noted_s < NOTE_INTERVAL_S:
            return
        self._noted_s = time.monotonic()
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": self._since, "done": done})
        with suppress(OSError):  # for example a full disk: others then only stop waiting sooner
            self._note_path.write_text(text)


@contextmanager
def build_lock(lock_path: Path, *, patience_s: float) -> Iterator[BuildNote]:
    """Acquire the build lock; waits while its holder makes progress, and `patience_s` longer.

    If it cannot be acquired (a read-only folder, a holder that hangs), the block runs without a lock: its code must not
    assume that no other process builds the same store.
    """
    from filelock import FileLock, Timeout  # takes 40 ms, which workers should not have to wait for

    lock, note_path = FileLock(lock_path), lock_path.with_suffix(".owner")
    try:
        lock.acquire(timeout=GRACE_S, poll_interval=0.02)
    except Timeout:
        if not _wait_for(lock, note_path, patience_s):
            yield BuildNote(None)
            return
    except (OSError, NotImplementedError) as error:
        logger.info("Cannot lock %s (%s): building the store without a lock.", lock_path, error)
        yield BuildNote(None)
        return
    try:
        yield BuildNote(note_path)
    finally:
        with suppress(OSError):
            note_path.unlink(missing_ok=True)
        lock.release()


def _wait_for(lock: "BaseFileLock", note_path: Path, patience_s: float) -> bool:
    """Wait for the lock; returns whether it was acquired."""
    from filelock import Timeout

    note, changed_s = read_note(note_path), time.monotonic()
    logger.warning("Waiting for %s, which is building the store of the same data.", _describe(note))
    while True:
        try:
            lock.acquire(timeout=min(0.5, patience_s), poll_interval=0.02)
            return True
        except Timeout:
            now = read_note(note_path)
            if now != note:
                note, changed_s = now, time.monotonic()
            elif time.monotonic() - changed_s > patience_s:
                logger.warning(
                    "%s has made no progress for %g s: building a private store instead.", _describe(note), patience_s
                )
                return False


def _describe(note: dict[str, object]) -> str:
    if not note:
        return "another process"
    return f"process {note.get('pid')} on {note.get('host')} (since {note.get('since')}, {note.get('done')} items)"


# Budgets

MEMORY_SHARE = 0.5
"""Default share of the free memory that a store takes: the model, the slots and the workers need the rest."""
DISK_SHARE = 0.9
MAX_OF_MEMORY = 0.9
"""Largest share of the free memory that a store takes, even with a larger budget: more risks the OOM killer."""


class OpenedStore(NamedTuple):
    """A store, and where it was found or built."""

    file: StoreFile
    path: Path | None
    """None for a store in memory."""
    location: StoreLocation
    budget_bytes: int


class Budget(NamedTuple):
    """How much memory or disk space a store may take."""

    asked_bytes: int | None
    default_bytes: int
    limit_bytes: int

    @property
    def nominal_bytes(self) -> int:
        return self.default_bytes if self.asked_bytes is None else self.asked_bytes


def memory_budget(asked_bytes: int | None, free_bytes: int) -> Budget:
    default, most = int(free_bytes * MEMORY_SHARE), int(free_bytes * MAX_OF_MEMORY)
    return Budget(asked_bytes, default, min(most, default if asked_bytes is None else asked_bytes))


def disk_budget(asked_bytes: int | None, free_bytes: int) -> Budget:
    default = int(free_bytes * DISK_SHARE)
    return Budget(asked_bytes, default, default if asked_bytes is None else asked_bytes)


def is_enough(header: StoreHeader, budget: Budget) -> bool:
    """Whether a store is large enough, so that rebuilding it would not give a larger one."""
    if not header.stopped_by:
        return True
    if header.stopped_by == "budget" and budget.asked_bytes is not None:
        return header.budget_bytes >= budget.asked_bytes
    # It was limited by the free space, which changes all the time: only rebuild if there is much more now.
    return budget.default_bytes <= header.nbytes


class StoreOpener:
    """One attempt to find or build a store."""

    def __init__(self, items: Items, config: StoreConfig) -> None:
        self._items = items
        self._config = config
        self._location = StoreLocation(Path(config.folder) if config.folder else default_folder(), key_of(items))
        self._on_disk = config.place == "disk"
        self._budget = self._find_budget()

    def find(self) -> OpenedStore | None:
        """An existing store that is large enough; None if there is none."""
        file = self._location.find_on_disk() if self._on_disk else self._location.find_in_memory()
        if file is None or not is_enough(file.header, self._budget):
            return None
        if self._config.verify and self._differs(file):
            self._location.reject(file)
            return None
        return self._opened(file)

    def build(self) -> OpenedStore | None:
        """Build the store, or wait for the process that builds it; None, with a warning, if there is no room.

        In memory if the folder is not writable.
        """
        obstacle = self._location.prepare()
        if obstacle:
            logger.warning(
                "Cannot write to %s (%s): the store is kept in memory for this run, separately in each process that "
                "opens it. Choose another folder with StoreConfig(folder=...).",
                self._location.path.parent,
                obstacle,
            )
        if self._on_disk:
            self._on_disk = not obstacle
            self._budget = self._find_budget()  # the folder may not have existed before
        with build_lock(self._location.lock_path, patience_s=self._config.patience_s) as build_note:
            if found := self.find():
                return found
            try:
                return self._opened(
                    self._build_on_disk(build_note) if self._on_disk else self._build_in_memory(build_note)
                )
            except (NoRoomError, OSError) as error:
                logger.warning(
                    "The store could not be built: %s in %s. Everything is decoded on every access. Free some space, "
                    "or use another place or folder.",
                    error,
                    self._location.path.parent if self._on_disk else "memory",
                )
                return None

    def _build_on_disk(self, build_note: BuildNote) -> StoreFile:
        with self._location.publishing() as fd:
            self._fill(fd, build_note)
        file = self._location.find_on_disk()
        if file is None:
            raise NoRoomError("the new store disappeared immediately")
        return file

    def _build_in_memory(self, build_note: BuildNote) -> StoreFile:
        fd = os.memfd_create("flatout-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._fill(fd, build_note)
            # Sealed, so that no process can write to it or truncate it while others read.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        except BaseException:  # Ctrl-C included: the descriptor must not leak
            os.close(fd)
            raise
        file = StoreFile(fd)
        self._location.register_memory(fd)
        return file

    def _fill(self, fd: int, build_note: BuildNote) -> None:
        items, config = self._items, self._config
        writer = StoreWriter(fd, num_items=len(items), limit_bytes=self._budget.limit_bytes)
        feed = FeedConfig(workers=config.workers, backend=config.backend, epochs=1, bad_share=1.0)
        with progress("decoding", len(items), shown=config.progress) as show:

            def advance(done: int, nbytes: int) -> None:
                build_note.update(done)
                show(done, nbytes)

            build(items, writer, feed, advance)
        writer.finish(state=self._location.state, budget_bytes=self._budget.nominal_bytes)
        self._warn_of_omissions(writer)

    def _warn_of_omissions(self, writer: StoreWriter) -> None:
        if writer.stopped_by:
            reason = "the budget is used up" if writer.stopped_by == "budget" else "there is no more room"
            logger.warning(
                "The store holds %d of %d items (%.0f MB): %s. The others are decoded on every access.",
                int((writer.index["state"] == STORED).sum()),
                len(self._items),
                writer.nbytes / 1e6,
                reason,
            )

    def _differs(self, file: StoreFile) -> bool:
        difference = first_difference(file, self._items, num_threads=self._config.num_workers)
        if difference:
            logger.warning("The store is rebuilt: %s.", difference)
        return bool(difference)

    def _find_budget(self) -> Budget:
        asked = self._config.budget_bytes
        if self._on_disk:
            return disk_budget(asked, self._location.free_bytes())
        budget = memory_budget(asked, machine.memory().free)
        if asked is not None and budget.limit_bytes < asked:
            logger.warning(
                "budget_bytes=%d is more than the free memory allows: at most %d MB are used.",
                asked,
                budget.limit_bytes / 1e6,
            )
        return budget

    def _opened(self, file: StoreFile) -> OpenedStore:
        return OpenedStore(
            file, self._location.path if self._on_disk else None, self._location, self._budget.nominal_bytes
        )
