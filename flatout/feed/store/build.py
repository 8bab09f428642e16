"""Decode everything once, in parallel, into a store: a feed reads the items, this process writes them down.

Items arrive in index order whatever the number of workers, so what a budget has room for is always the same subset.

Find the store that belongs to some items, or build it: in memory, on disk, as far as the room goes.
"""

import fcntl
import json
import logging
import os
import pickle
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from flatout.clock import machine
from flatout.errors import ConfigError
from flatout.feed.config import FeedConfig
from flatout.feed.feed import Feed
from flatout.feed.plan import Plan
from flatout.feed.processes import blame
from flatout.feed.source import DecodeError, Field, Rows, SampleSource
from flatout.feed.store.file import (
    ENTRY,
    HERE,
    UNREADABLE,
    Header,
    Items,
    NoRoomError,
    StoreConfig,
    StoreFile,
    StoreWriter,
    decode_item,
    describe,
)
from flatout.feed.store.home import Home, default_folder, key_of
from flatout.feed.worker import cause_of
from flatout.progress import Advance, progress

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)

# Is a store still what its input files say? Reads every byte of both, which is why it is done on demand only.


def first_difference(file: StoreFile, items: Items, *, num_threads: int) -> str:
    """One sentence about the first item that is damaged or whose input has another content; "" if there is none."""

    def look_at(index: int) -> str:
        if not file.holds(index):
            return ""
        if not file.is_intact(index):
            return f"the stored bytes of {items.where(index)} are damaged"
        is_same = crc_of_file(items.path(index)) == int(file.index["source_crc"][index])
        return "" if is_same else f"{items.where(index)} is gone or has another content than when it was decoded"

    # Threads: zlib computes without the GIL.
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        return next(filter(None, pool.map(look_at, range(len(file)))), "")


def crc_of_file(path: str) -> int:
    """CRC-32 of a file's bytes; 0 for what is no file, such as a member of an archive."""
    crc = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
    except OSError:
        return 0
    return crc


Decoded = tuple[np.ndarray, np.ndarray]
"""The index entry of an item, and its bytes: ENTRY [], uint8 [nbytes]."""

BATCH_BYTES = 16 << 20
MOST_PER_BATCH = 256
ITEMS_PROBED = 8
TOLD_EVERY = 8
"""Items between two words about progress."""


class Decoding(SampleSource):
    """Each item as bytes with its index entry; of one that cannot be decoded, the reason as text."""

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
        """An item that can be decoded."""
        array = decode_item(self._items, index)
        entry = describe(array, self._source_crc(self._items.path(index)))
        return entry, array.reshape(-1).view(np.uint8)

    def _source_crc(self, path: str) -> int:
        if self._last_input[0] != path:  # neighbours often come from one file
            self._last_input = path, crc_of_file(path)
        return self._last_input[1]


def build(items: Items, writer: StoreWriter, config: FeedConfig, advance: Advance) -> None:
    """Decode the items in index order until all are written or the writer is full; says what could not be decoded.

    Every item is decoded once: those that were looked at to learn their size are written as they are.
    """
    if config.num_workers and config.backend == "process":
        check_picklable(items)
    known = _probed(items)
    unreadable: dict[int, str] = {}
    for number, (index, outcome) in enumerate(_in_order(items, known, config)):
        if isinstance(outcome, str):
            unreadable[index] = outcome
            writer.leave_out(index)
        elif not writer.add(index, *outcome):
            break
        if number % TOLD_EVERY == 0 or index == len(items) - 1:
            advance(index + 1, writer.nbytes)
    _tell(items, unreadable)


def _in_order(items: Items, known: dict[int, Decoded], config: FeedConfig) -> Iterator[tuple[int, Decoded | str]]:
    """Every item, decoded, or why it cannot be."""
    rest = np.array([index for index in range(len(items)) if index not in known], np.int64)
    expected_bytes = max([BATCH_BYTES // MOST_PER_BATCH, *(len(data) * 5 // 4 for _, data in known.values())])
    given = 0
    for index, outcome in _decoded(items, rest, expected_bytes, config):
        while given < index:
            yield given, known.pop(given)
            given += 1
        yield index, outcome
        given = index + 1
    for index in range(given, len(items)):
        yield index, known.pop(index)


def _decoded(
    items: Items, indices: np.ndarray, expected_bytes: int, config: FeedConfig
) -> Iterator[tuple[int, Decoded | str]]:
    """Some items by a feed's workers; what is given is overwritten afterwards."""
    if not len(indices):
        return
    batch_size = max(1, min(BATCH_BYTES // expected_bytes, len(indices)))
    plan = Plan(num_samples=len(items), batch_size=batch_size, shuffle=False, last="short", order=indices)
    with Feed(Decoding(items, expected_bytes), plan, config) as feed:
        for batch in feed:
            ends = np.cumsum(batch.counts["data"]).tolist()
            pieces = np.split(batch["data"].reshape(-1), ends[:-1])
            for row, data in enumerate(pieces):
                index, entry = int(indices[batch.positions[row]]), batch["entry"][row]
                if batch.indices[row] != index:  # it killed its workers
                    yield index, feed.bad_samples[index]
                elif entry["state"] == UNREADABLE:
                    yield index, data.tobytes().decode()
                else:
                    yield index, (entry, data)


def check_picklable(items: Items) -> None:
    """Refuse items that cannot be sent to worker processes, and say which part of them is to blame."""
    try:
        pickle.dumps(items)
    except Exception as error:  # whatever a class does when it is pickled
        raise ConfigError(
            f"{type(items).__name__} cannot be sent to worker processes: {blame(items)} cannot be pickled ({error}). "
            "Open such things on first use in `decode`, or use StoreConfig(backend='thread') or StoreConfig(workers=0)."
        ) from error


def _probed(items: Items) -> dict[int, Decoded]:
    """A few items from all over the set: they tell how much room one takes."""
    source, found = Decoding(items, 1), {}
    for index in np.unique(np.linspace(0, len(items) - 1, ITEMS_PROBED).astype(int)).tolist():
        # Not swallowed: the feed decodes it again, and then the error comes with its item.
        with suppress(Exception):
            entry, data = source.decoded(index)
            found[index] = entry, data
    return found


def _tell(items: Items, unreadable: Mapping[int, str]) -> None:
    if unreadable:
        index, cause = next(iter(unreadable.items()))
        logger.warning(
            "%d of %d items could not be decoded and will be missing from the store; the first: %s (%s).",
            len(unreadable),
            len(items),
            items.where(index),
            cause,
        )


# Whose turn is it to build a store? One process builds, the others wait for it, but never for ever.
#
# The lock is the kernel's: it is gone with its holder, however that one ends. What the kernel cannot know is whether a
# holder on another machine, or one that was stopped, will ever go on. So the holder notes its progress beside the
# lock, and a note that does not change for long enough is not waited for: the others then build for themselves.

NOTE_INTERVAL_S = 1.0
GRACE_S = 0.2
"""Waited without a word: by then a holder has said who it is."""


class Turn:
    """The right to build; `note` says how far it is."""

    def __init__(self, note_path: Path | None) -> None:
        self._note_path = note_path
        self._since = datetime.now().isoformat(" ", "seconds")
        self._noted_s = -NOTE_INTERVAL_S
        self.note(0)

    def note(self, done: int) -> None:
        """Tell those who wait how many items are done."""
        if self._note_path is None or time.monotonic() - self._noted_s < NOTE_INTERVAL_S:
            return
        self._noted_s = time.monotonic()
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": self._since, "done": done})
        with suppress(OSError):  # a full disk: nobody must wait less than they would
            self._note_path.write_text(text)


@contextmanager
def turn_to_build(lock_path: Path, *, patience_s: float) -> Iterator[Turn]:
    """Wait for the lock; blocks while its holder makes progress, and `patience_s` longer.

    Where no lock can be had (a read-only folder, a holder that hangs) the turn is a private one: whatever is
    built then must not rely on being alone.
    """
    from filelock import FileLock, Timeout  # 40 ms, which no worker has to wait for

    lock, note_path = FileLock(lock_path), lock_path.with_suffix(".owner")
    try:
        lock.acquire(timeout=GRACE_S, poll_interval=0.02)
    except Timeout:
        if not _wait_for(lock, note_path, patience_s):
            yield Turn(None)
            return
    except (OSError, NotImplementedError) as error:
        logger.info("No lock at %s (%s): building without one.", lock_path, error)
        yield Turn(None)
        return
    try:
        yield Turn(note_path)
    finally:
        with suppress(OSError):
            note_path.unlink(missing_ok=True)
        lock.release()


def _wait_for(lock: "BaseFileLock", note_path: Path, patience_s: float) -> bool:
    """Whether the lock could be had."""
    from filelock import Timeout

    note, changed_s = _read(note_path), time.monotonic()
    logger.warning("Waiting for %s to build the store of the same data.", _describe(note))
    while True:
        try:
            lock.acquire(timeout=min(0.5, patience_s), poll_interval=0.02)
            return True
        except Timeout:
            now = _read(note_path)
            if now != note:
                note, changed_s = now, time.monotonic()
            elif time.monotonic() - changed_s > patience_s:
                logger.warning(
                    "%s has made no progress for %g s: building a private store instead.", _describe(note), patience_s
                )
                return False


def _read(note_path: Path) -> dict[str, object]:
    try:
        note = json.loads(note_path.read_text())
    except (OSError, ValueError):
        return {}  # not written yet, or half written
    return note if isinstance(note, dict) else {}


def _describe(note: dict[str, object]) -> str:
    if not note:
        return "another process"
    return f"process {note.get('pid')} on {note.get('host')} (since {note.get('since')}, {note.get('done')} items)"


MEMORY_SHARE = 0.5
"""Of the free memory, what a store takes unless told otherwise: the model, the slots and the workers need the rest."""
DISK_SHARE = 0.9
MOST_OF_MEMORY = 0.9
"""Of the free memory, what a store takes at most, also if it was told to take more: beyond waits the OOM killer."""


class Opened(NamedTuple):
    """A store, and where it was found or put."""

    file: StoreFile
    path: Path | None
    """None for one in memory."""
    home: Home
    budget_bytes: int


class Budget(NamedTuple):
    """How much a store may take."""

    asked_bytes: int | None
    default_bytes: int
    limit_bytes: int

    @property
    def nominal_bytes(self) -> int:
        return self.default_bytes if self.asked_bytes is None else self.asked_bytes


def memory_budget(asked_bytes: int | None, free_bytes: int) -> Budget:
    default, most = int(free_bytes * MEMORY_SHARE), int(free_bytes * MOST_OF_MEMORY)
    return Budget(asked_bytes, default, min(most, default if asked_bytes is None else asked_bytes))


def disk_budget(asked_bytes: int | None, free_bytes: int) -> Budget:
    default = int(free_bytes * DISK_SHARE)
    return Budget(asked_bytes, default, default if asked_bytes is None else asked_bytes)


def is_enough(header: Header, budget: Budget) -> bool:
    """Whether building anew would give no larger store."""
    if not header.stopped_by:
        return True
    if header.stopped_by == "budget" and budget.asked_bytes is not None:
        return header.budget_bytes >= budget.asked_bytes
    # It was cut to the room there was; that changes all the time, so only much more of it counts.
    return budget.default_bytes <= header.nbytes


def find_or_build(items: Items, config: StoreConfig) -> Opened | None:
    """A store of these items; None, with a sentence in the log, where there is room for none. May wait for others."""
    opening = Opening(items, config)
    return opening.find() or opening.build()


class Opening:
    """One attempt to get at a store."""

    def __init__(self, items: Items, config: StoreConfig) -> None:
        self._items = items
        self._config = config
        self._home = Home(Path(config.folder) if config.folder else default_folder(), key_of(items))
        self._on_disk = config.place == "disk"
        self._budget = self._find_budget()

    def find(self) -> Opened | None:
        """A store that is there already and large enough."""
        file = self._home.find_on_disk() if self._on_disk else self._home.find_in_memory()
        if file is None or not is_enough(file.header, self._budget):
            return None
        if self._config.verify and self._differs(file):
            self._home.reject(file)
            return None
        return self._opened(file)

    def build(self) -> Opened | None:
        """Build it, or wait for somebody else who does."""
        obstacle = self._home.prepare()
        if obstacle:
            logger.warning(
                "Nothing can be written to %s (%s): the store is kept in memory for this run, by each process that "
                "opens it for itself. Choose another folder with StoreConfig(folder=...).",
                self._home.path.parent,
                obstacle,
            )
        if self._on_disk:
            self._on_disk = not obstacle
            self._budget = self._find_budget()  # the folder may not have been there before
        with turn_to_build(self._home.lock_path, patience_s=self._config.patience_s) as turn:
            if found := self.find():
                return found
            try:
                return self._opened(self._build_on_disk(turn) if self._on_disk else self._build_in_memory(turn))
            except (NoRoomError, OSError) as error:
                logger.warning(
                    "No store: %s in %s. Everything is decoded on every visit; free some room, or use another place or "
                    "folder.",
                    error,
                    self._home.path.parent if self._on_disk else "memory",
                )
                return None

    def _build_on_disk(self, turn: Turn) -> StoreFile:
        with self._home.publishing() as fd:
            self._fill(fd, turn)
        file = self._home.find_on_disk()
        if file is None:
            raise NoRoomError("the new store was gone at once")
        return file

    def _build_in_memory(self, turn: Turn) -> StoreFile:
        fd = os.memfd_create("flatout-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._fill(fd, turn)
            # From now on nobody can write to it or cut it short, so no reader can be hurt.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        except BaseException:
            os.close(fd)
            raise
        file = StoreFile(fd)
        self._home.register_memory(fd)
        return file

    def _fill(self, fd: int, turn: Turn) -> None:
        items, config = self._items, self._config
        writer = StoreWriter(fd, num_items=len(items), limit_bytes=self._budget.limit_bytes)
        feed = FeedConfig(workers=config.workers, backend=config.backend, epochs=1, bad_share=1.0)
        with progress("decoding", len(items), shown=config.progress) as show:

            def advance(done: int, nbytes: int) -> None:
                turn.note(done)
                show(done, nbytes)

            build(items, writer, feed, advance)
        writer.finish(state=self._home.state, budget_bytes=self._budget.nominal_bytes)
        self._tell_what_is_left_out(writer)

    def _tell_what_is_left_out(self, writer: StoreWriter) -> None:
        if writer.stopped_by:
            reason = "the budget is used up" if writer.stopped_by == "budget" else "there is no more room"
            logger.warning(
                "The store holds %d of %d items (%.0f MB): %s. The others are decoded on every visit.",
                int((writer.index["state"] == HERE).sum()),
                len(self._items),
                writer.nbytes / 1e6,
                reason,
            )

    def _differs(self, file: StoreFile) -> bool:
        threads = FeedConfig(workers=self._config.workers).num_workers
        difference = first_difference(file, self._items, num_threads=threads)
        if difference:
            logger.warning("The store is built anew: %s.", difference)
        return bool(difference)

    def _find_budget(self) -> Budget:
        asked = self._config.budget_bytes
        if self._on_disk:
            return disk_budget(asked, self._home.free_bytes())
        budget = memory_budget(asked, machine.memory().free)
        if asked is not None and budget.limit_bytes < asked:
            logger.warning(
                "budget_bytes=%d is more than the free memory allows: %d MB are used at most.",
                asked,
                budget.limit_bytes / 1e6,
            )
        return budget

    def _opened(self, file: StoreFile) -> Opened:
        return Opened(file, self._home.path if self._on_disk else None, self._home, self._budget.nominal_bytes)
