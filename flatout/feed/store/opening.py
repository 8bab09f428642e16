"""Find the store that belongs to some items, or build it: in memory, on disk, as far as the room goes."""

import fcntl
import logging
import os
from pathlib import Path
from typing import NamedTuple

from flatout.feed.knobs import FeedConfig
from flatout.feed.progress import progress
from flatout.feed.store.build import build
from flatout.feed.store.check import first_difference
from flatout.feed.store.config import StoreConfig
from flatout.feed.store.file import HERE, Header, StoreFile
from flatout.feed.store.home import Home, default_folder
from flatout.feed.store.items import Items
from flatout.feed.store.key import key_of
from flatout.feed.store.lock import Turn, turn_to_build
from flatout.feed.store.writer import NoRoomError, StoreWriter
from flatout.profiler import machine

logger = logging.getLogger(__name__)

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
