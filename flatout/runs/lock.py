"""The lock of a run folder, so that only one process trains in it at a time; it names its holder and survives no crash.

The kernel releases the lock when the holding process ends, however that happens. The text in the file is for people,
and for file systems shared with other hosts, whose processes are not visible from here.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from flatout.errors import ConfigError, ResourceError

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held_here: dict[tuple[int, int], dict[str, Any]] = {}
"""Locks of this process by device and inode. The kernel would grant them again, and release them when any descriptor of
the file is closed: such a file must not even be opened a second time."""


class Locked(ConfigError):
    """The run folder is in use by another training."""


class RunLock(AbstractContextManager["RunLock"]):
    """The lock of a run folder; acquired on creation, released by `close` or at the end of the process.

    Locked (exit code 2) if another process holds it. With `break_lock`, a lock of another host is taken over.
    """

    def __init__(self, folder: Path, *, break_lock: bool = False) -> None:
        self._path = folder / LOCK_NAME
        self._fd: int | None = _open_locked(self._path)
        self._key = _key(self._fd)
        try:
            self._take_over(_read(self._fd), break_lock)
            _held_here[self._key] = _write(self._fd)
        except BaseException:  # whatever ends it, the lock must be released
            self._release()
            raise

    def close(self) -> None:
        """Release the lock; may be called twice."""
        if self._fd is not None:
            _held_here.pop(self._key, None)
            # Removed before it is released: afterwards the file may belong to another process.
            with suppress(OSError):
                self._path.unlink()
            self._release()

    def _release(self) -> None:
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _take_over(self, holder: dict[str, Any], break_lock: bool) -> None:
        """Check the holder in the file: the kernel's lock is free, so that process has ended or is on another host."""
        if not holder:
            return
        if holder.get("host") == socket.gethostname():
            logger.info("%s: process %s ended without releasing the lock; taking over.", self._path, holder.get("pid"))
        elif not break_lock:
            raise Locked(
                f"{self._path.parent} is locked by {describe(holder)}, which cannot be checked from this host. "
                "If that process has ended, add --break-lock; otherwise choose another name with --name."
            )


def describe(holder: dict[str, Any]) -> str:
    """The holder of a lock as text: 'process 4711 on host gpu7, started 2026-03-01 14:02:11'."""
    pid, host, started = (holder.get(key, "unknown") for key in ("pid", "host", "started"))
    return f"process {pid} on host {host}, started {started}"


def _open_locked(path: Path) -> int:
    while True:
        _refuse_own(path)
        fd = _open(path)
        try:
            _lock(fd, path)
        except BaseException:  # whatever ends it, the file must be closed
            os.close(fd)
            raise
        # The previous holder may have removed the file after we opened it and before we locked it.
        with suppress(FileNotFoundError):
            if _key(fd) == _key(path):
                return fd
        os.close(fd)


def _refuse_own(path: Path) -> None:
    with suppress(FileNotFoundError):
        if holder := _held_here.get(_key(path)):
            raise _in_use(path, holder)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ResourceError(
            f"{path.parent}: cannot be written: {error.strerror}. Choose another folder with --project."
        ) from error


def _lock(fd: int, path: Path) -> None:
    try:
        # POSIX locks: unlike those of flock, they are not inherited by forked children.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise _in_use(path, _read(fd)) from None
        logger.warning("%s: this file system does not support locks; do not run two trainings in one folder.", path)


def _in_use(path: Path, holder: dict[str, Any]) -> Locked:
    return Locked(f"{path.parent} is in use by {describe(holder)}. Wait for it, or choose another name with --name.")


def _key(file: int | Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _read(fd: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(fd, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _write(fd: int) -> dict[str, Any]:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(fd, 0)
    # On a full disk the file stays empty, which the kernel's lock does not mind.
    with suppress(OSError):
        os.pwrite(fd, json.dumps(holder).encode(), 0)
    return holder
