"""Where stores live on disk and in memory, and which one belongs to some items.

<name>.store    a store, published whole by a rename
<name>.memory   which process holds the store in its memory, and how to open it
<name>.lock     held by whoever builds; <name>.owner says who that is and how far
<name>.*.part   being written; a leftover of a killed process is removed by the next one that builds
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
from pathlib import Path
from typing import NamedTuple

from flatout.feed.store.file import VERSION, Items, StoreFile, StoreFileError

logger = logging.getLogger(__name__)

# Which store belongs to these items? Same files, same parameters: same key, in any run on this machine.


class StoreKey(NamedTuple):
    """Two stores of one family hold the same items at different times: the older one is of no use any more."""

    family: str
    """What is decoded, and how: paths, parameters, kind of items, version of the format."""
    state: str
    """The family, and the state of every input file: size, mtime, ctime and inode."""

    @property
    def name(self) -> str:
        """The stem of the file names."""
        return f"{self.family[:16]}-{self.state[:32]}"


def key_of(items: Items) -> StoreKey:
    """Asks for the status of every input file; none is opened."""
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
    last, path, state = None, "", ""
    for index in range(len(items)):
        name = items.path(index)
        if name != last:  # neighbours often come from one file
            last, path, state = name, os.path.abspath(name), _state_of(name)
        yield path, state


def _state_of(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return "absent;"  # reading the item says what is wrong with it
    return f"{status.st_size},{status.st_mtime_ns},{status.st_ctime_ns},{status.st_ino};"


# How another process of this machine gets at an open file of ours that may have no name.
#
# It opens /proc/<pid>/fd/<n>, as long as the process that holds the file lives. An address can outlive its process, so
# it says which process is meant: number, start time and boot.


class FdAddress(NamedTuple):
    """An open file of a certain process. Plain values: it can be pickled, or written down as JSON."""

    boot: str
    pid: int
    start: int
    """When the process started, in clock ticks since the boot."""
    fd: int

    @classmethod
    def of(cls, fd: int) -> "FdAddress":
        """The address of a descriptor of this process."""
        pid = os.getpid()
        return cls(_boot(), pid, _start_of(pid), fd)

    def open(self, flags: int = os.O_RDONLY) -> int:
        """Another descriptor of the same file; OSError if that process or its file is gone, or not ours to see."""
        if self.boot != _boot() or self.start != _start_of(self.pid):
            raise ProcessLookupError(f"process {self.pid} is gone")
        path = f"/proc/{self.pid}/fd/{self.fd}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a terminal or a pipe would not be harmless
            raise FileNotFoundError(f"process {self.pid} has closed the file")
        return os.open(path, flags | os.O_CLOEXEC)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_of(pid: int) -> int:
    # The name before it may contain anything, brackets and blanks included.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def default_folder() -> Path:
    """$XDG_CACHE_HOME/flatout/stores, or the same below ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flatout" / "stores"


class Home:
    """The files of one store."""

    def __init__(self, folder: Path, key: StoreKey) -> None:
        self._folder = folder
        self._key = key
        self._rejected: set[tuple[int, int, int]] = set()
        self.state = key.state
        self.path = folder / f"{key.name}.store"
        self.lock_path = folder / f"{key.name}.lock"
        self._memory_path = folder / f"{key.name}.memory"

    def prepare(self) -> str:
        """Make the folder and tidy it up; returns why nothing can be written there, or ""."""
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
        """Room on the folder's disk; 0 where there is no folder."""
        try:
            return shutil.disk_usage(self._folder).free
        except OSError:
            return 0

    def find_on_disk(self) -> StoreFile | None:
        """The published store, if there is a whole one."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        return self._open(fd, str(self.path))

    def find_in_memory(self) -> StoreFile | None:
        """The store in another process's memory, or in this one's, if there is one; a stale record is nothing."""
        try:
            address = FdAddress(*json.loads(self._memory_path.read_text()))
            fd = address.open()
        except (OSError, ValueError, TypeError):
            return None
        return self._open(fd, f"in the memory of process {address.pid}")

    def reject(self, file: StoreFile) -> None:
        """Do not find this file again."""
        self._rejected.add(_identity(file.fd))
        file.close()

    @contextmanager
    def publishing(self) -> Iterator[int]:
        """A descriptor to write the store to; it appears under its name, whole, when the block ends without error."""
        part = self._folder / f"{self._key.name}.{_whoami()}.part"
        with _locked_part(part) as fd:
            yield fd
            os.fsync(fd)
            part.rename(self.path)
            _sync_folder(self._folder)
        for other in self._folder.glob(f"{self._key.family[:16]}-*.store"):
            if other != self.path:  # of the same files before they changed
                with suppress(OSError):
                    other.unlink()

    def register_memory(self, fd: int) -> None:
        """Let other processes of this machine find the store behind `fd`; without a record they build their own."""
        with suppress(OSError):
            self._memory_path.write_text(json.dumps(FdAddress.of(fd)))

    def forget_memory(self, fd: int) -> None:
        """Take our own record back."""
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
                logger.warning("The store %s cannot be used: %s. It is built anew.", name, error)
            return None
        return None if identity in self._rejected else file


@contextmanager
def _locked_part(path: Path) -> Iterator[int]:
    """A new file that is locked while we write it, and gone afterwards unless it was renamed."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Between the two lines above it may have been taken for a leftover.
            if os.fstat(fd).st_nlink == 0:
                continue
            os.ftruncate(fd, 0)
            yield fd
            return
        finally:
            _remove_same(path, fd)
            os.close(fd)


def _remove_if_left_behind(path: Path) -> None:
    """Remove a file whose writer is dead: nobody holds its lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_same(path, fd)
    except OSError:
        return  # it lives
    finally:
        os.close(fd)


def _remove_same(path: Path, fd: int) -> None:
    """Remove `path` if it still is the file behind `fd`."""
    with suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            path.unlink()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _identity(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_ctime_ns  # the number alone may come back


def _whoami() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"
