"""Replace a file so that a reader finds the old one or the whole new one, also after a power cut.

write to a hidden name beside it -> fsync -> rename -> fsync of the folder
"""

import errno
import os
import re
import resource
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from flatout.errors import ResourceError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PART = re.compile(r"\..+\.(\d+)\.[0-9a-f]{8}\.part")
"""What `replacing` calls a file that is not whole yet; the number is the process that writes it."""


class Sink:
    """What a writer gets: takes bytes and remembers the system's first complaint.

    Writers in C++ turn an error of `write` into one of their own that says nothing. After a complaint this one reports
    that nothing was written, and lets `replacing` tell the reason.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.complaint: OSError | None = None

    def write(self, content: bytes | memoryview) -> int:
        if self.complaint is None:
            try:
                return self._file.write(content)
            except OSError as error:
                self.complaint = error
        return 0

    def flush(self) -> None:
        """Nothing to do: `replacing` syncs."""


@contextmanager
def replacing(path: Path, *, needed_bytes: int) -> Iterator[Sink]:
    """Write the new content of `path` into the sink; it appears under its name when the block ends without error.

    ResourceError if the disk has no room, before anything is written where that can be known, or cannot be written to.
    """
    path = path.resolve()
    hidden = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        _check_room(path, needed_bytes)
        with hidden.open("xb") as file:
            yield from _filled(file)
        hidden.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(error, path, needed_bytes) from error
    finally:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)


def _filled(file: IO[bytes]) -> Iterator[Sink]:
    sink = Sink(file)
    try:
        yield sink
    except RuntimeError:
        # What torch's zip writer raises when its bytes are not taken.
        if sink.complaint is None:
            raise
    if sink.complaint is not None:
        raise sink.complaint
    file.flush()
    os.fsync(file.fileno())


def _check_room(path: Path, needed_bytes: int) -> None:
    if needed_bytes > shutil.disk_usage(path.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_error(error: OSError, path: Path, needed_bytes: int) -> ResourceError:
    """What to tell somebody whose disk did not take a file."""
    if error.errno == errno.EFBIG:
        return ResourceError(
            f"{path}: the file would have about {needed_bytes:,} bytes, and {_largest_file()}. What was there before "
            "is untouched. Raise the limit (ulimit -f unlimited) or choose another disk."
        )
    if error.errno == errno.EDQUOT:
        return ResourceError(
            f"{path}: your disk quota is used up: {needed_bytes:,} bytes are needed. What was there before is "
            "untouched. Free some space or choose another folder."
        )
    if error.errno not in _NO_ROOM:
        return ResourceError(f"{path}: cannot be written: {error.strerror}. Check the folder and its permissions.")
    free = f"{shutil.disk_usage(path.parent).free:,}" if path.parent.is_dir() else "no"
    return ResourceError(
        f"{path}: no room: {needed_bytes:,} bytes are needed, {free} are free. What was there before is untouched. "
        "Free some space or choose another folder."
    )


def file_size_limit() -> int | None:
    """The largest file that this process may write, in bytes (ulimit -f); None if that is not limited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def _largest_file() -> str:
    limit = file_size_limit()
    if limit is None:
        return "this file system does not take files that large"
    return f"this process may write files of {limit:,} bytes at most (ulimit -f)"


def remove_stale_parts(folder: Path) -> None:
    """Remove what killed processes left unfinished in a run folder and those directly in it; its lock must be held."""
    for path in (*folder.glob(".*.part"), *folder.glob("*/.*.part")):
        found = _PART.fullmatch(path.name)
        if found is not None and not _is_at_work(int(found[1])):
            with suppress(OSError):
                path.unlink()


def _is_at_work(pid: int) -> bool:
    """Whether another process has this number. In containers ours is often that of the one that was killed."""
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


def ran_out_of_room(error: ResourceError) -> bool:
    """Whether a file was not written for want of space."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_ROOM


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
