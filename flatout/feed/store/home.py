"""Where stores are kept on disk and in memory, and which one belongs to given items.

<name>.store    a complete store, published by a rename
<name>.memory   which process holds the store in its memory, and how to open it
<name>.lock     held by the process that builds; <name>.owner describes it and its progress
<name>.*.part   being written; if its process was killed, the next process that builds removes it
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from flatout.clock import machine
from flatout.feed.store.file import VERSION, Items, StoreFile, StoreFileError
from flatout.safefiles import sync_folder

logger = logging.getLogger(__name__)

# Store keys: the same files and parameters give the same key, in any run on this machine


class StoreKey(NamedTuple):
    """Identifies a store. Stores of one family hold the same items at different times; the older one is obsolete."""

    family: str
    """Hash of what is decoded and how: paths, parameters, class of the items, version of the format."""
    state: str
    """Hash of the family and of the state of every input file: size, mtime, ctime and inode."""

    @property
    def name(self) -> str:
        """The stem of the file names."""
        return f"{self.family[:16]}-{self.state[:32]}"


def key_of(items: Items) -> StoreKey:
    """The key of some items. Calls stat() on every input file, but opens none."""
    # The class's own attribute, not an inherited one: a subclass may decode differently.
    kind = vars(type(items)).get("store_kind", type(items).__qualname__)
    family = hashlib.sha256(repr((VERSION, kind, items.parameters, len(items))).encode())
    state = hashlib.sha256()
    for path, file_state in _inputs(items):
        family.update(os.fsencode(path) + b"\0")
        state.update(file_state.encode())
    state.update(family.digest())
    return StoreKey(family.hexdigest(), state.hexdigest())


def _inputs(items: Items) -> Iterator[tuple[str, str]]:
    """Absolute path and state of each item's input file."""
    for name, neighbours in groupby(map(items.path, range(len(items)))):  # neighbours often come from one file
        path_and_state = os.path.abspath(name), _state_of(name)
        yield from (path_and_state for _ in neighbours)


def _state_of(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return "absent;"  # decoding the item will raise the proper error
    return f"{status.st_size},{status.st_mtime_ns},{status.st_ctime_ns},{status.st_ino};"


# Access to an open file of another process on this machine, even if the file has no name.
#
# It is opened as /proc/<pid>/fd/<n>, as long as the process that holds the file lives. An address can outlive its
# process, so it identifies the process by pid, start time and boot.


class FdAddress(NamedTuple):
    """An open file of a certain process. Contains plain values, so it can be pickled or stored as JSON."""

    boot: str
    pid: int
    start: int
    """Start time of the process, in clock ticks since boot."""
    fd: int

    @classmethod
    def of(cls, fd: int) -> "FdAddress":
        """The address of a file descriptor of this process."""
        pid = os.getpid()
        return cls(_boot(), pid, machine.start_ticks(pid), fd)

    def open(self, flags: int = os.O_RDONLY) -> int:
        """A new descriptor of the same file; raises OSError if the process or file is gone or access is denied."""
        if self.boot != _boot() or self.start != machine.start_ticks(self.pid):
            raise ProcessLookupError(f"process {self.pid} is gone")
        path = f"/proc/{self.pid}/fd/{self.fd}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a terminal or a pipe could have side effects
            raise FileNotFoundError(f"process {self.pid} has closed the file")
        return os.open(path, flags | os.O_CLOEXEC)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def default_folder() -> Path:
    """$XDG_CACHE_HOME/flatout/stores, or the same below ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flatout" / "stores"


class StoreLocation:
    """Where one store is: finds it on disk or in a process, publishes a new one in place of older ones."""

    def __init__(self, folder: Path, key: StoreKey) -> None:
        self._folder = folder
        self._key = key
        self._rejected: set[tuple[int, int, int]] = set()
        self.state = key.state
        self.path = folder / f"{key.name}.store"
        self.lock_path = folder / f"{key.name}.lock"
        self._memory_path = folder / f"{key.name}.memory"

    def prepare(self) -> str:
        """Create the folder and remove leftovers; returns why nothing can be written there, or ""."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked_part(self._folder / f"{self._key.name}.probe.{_whoami()}.part") as fd:
                os.write(fd, b"\0")
        except OSError as error:
            return error.strerror or str(error)
        for part in self._folder.glob("*.part"):
            _remove_if_left_behind(part)
        return ""

    def free_bytes(self) -> int:
        """Free space on the folder's disk; 0 if there is no folder."""
        try:
            return shutil.disk_usage(self._folder).free
        except OSError:
            return 0

    def find_on_disk(self) -> StoreFile | None:
        """The published store, if there is a complete one."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        return self._open(fd, str(self.path))

    def find_in_memory(self) -> StoreFile | None:
        """The store in the memory of this or another process, if there is one; stale records are ignored."""
        try:
            address = FdAddress(*json.loads(self._memory_path.read_text()))
            fd = address.open()
        except (OSError, ValueError, TypeError):
            return None
        return self._open(fd, f"in the memory of process {address.pid}")

    def reject(self, file: StoreFile) -> None:
        """Close this file and never find it again."""
        self._rejected.add(_identity(file.fd))
        file.close()

    @contextmanager
    def publishing(self) -> Iterator[int]:
        """A descriptor to write the store to; it is published under its name when the block ends without an error."""
        part = self._folder / f"{self._key.name}.{_whoami()}.part"
        with _locked_part(part) as fd:
            yield fd
            os.fsync(fd)
            part.rename(self.path)
            sync_folder(self._folder)
        for other in self._folder.glob(f"{self._key.family[:16]}-*.store"):
            if other != self.path:  # the same files before they changed
                with suppress(OSError):
                    other.unlink()

    def register_memory(self, fd: int) -> None:
        """Record the store behind `fd` for other processes of this machine; without a record they build their own."""
        with suppress(OSError):
            self._memory_path.write_text(json.dumps(FdAddress.of(fd)))

    def forget_memory(self, fd: int) -> None:
        """Remove the record of the store behind `fd`."""
        with suppress(OSError, ValueError):
            if json.loads(self._memory_path.read_text()) == list(FdAddress.of(fd)):
                self._memory_path.unlink()

    def _open(self, fd: int, name: str) -> StoreFile | None:
        identity = _identity(fd)
        try:
            file = StoreFile(fd)
            if file.header.state != self.state:
                raise StoreFileError("it belongs to other data")
        except StoreFileError as error:
            if identity not in self._rejected:
                self._rejected.add(identity)
                logger.warning("The store %s cannot be used: %s. It is rebuilt.", name, error)
            return None
        return None if identity in self._rejected else file


@contextmanager
def _locked_part(path: Path) -> Iterator[int]:
    """A new file that is locked while it is written, and removed afterwards unless it was renamed."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Between the two calls above, another process may have removed it as a leftover.
            if os.fstat(fd).st_nlink == 0:
                continue
            os.ftruncate(fd, 0)
            yield fd
            return
        finally:
            remove_same(path, fd)
            os.close(fd)


def _remove_if_left_behind(path: Path) -> None:
    """Remove a file whose writer is dead, which is the case if no process holds its lock."""
    with suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError while its writer lives
        remove_same(path, file.fileno())


def remove_same(path: Path, fd: int) -> None:
    """Remove `path` if it still is the file behind `fd`."""
    with suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            path.unlink()


def _identity(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_ctime_ns  # inode numbers are reused


def _whoami() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"
