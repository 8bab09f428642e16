"""Replace a file atomically: a reader finds the old or the complete new content, even after a power failure.

write to a hidden file in the same folder -> fsync -> rename -> fsync of the folder
"""

import csv
import errno
import io
import os
import re
import resource
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from flatout.errors import ResourceError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_PART = re.compile(r"\..+\.(\d+)\.[0-9a-f]{8}\.part")
"""Names of the incomplete files of `replacing`; the number is the id of the writing process."""


class Sink:
    """Writes bytes to a file and keeps the first error.

    Writers in C++ replace an exception of `write` by an uninformative one of their own. So after an error `write`
    returns 0, and `replacing` raises the original.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, content: bytes | memoryview) -> int:
        if self.error is None:
            try:
                return self._file.write(content)
            except OSError as error:
                self.error = error
        return 0

    def flush(self) -> None:
        """Nothing to do: `replacing` syncs."""


@contextmanager
def replacing(path: Path, *, needed_bytes: int) -> Iterator[Sink]:
    """Write the new content of `path` to the sink; it replaces the file when the block ends without an error.

    ResourceError if the disk is full or cannot be written to. If `needed_bytes` do not fit, nothing is written at all.
    """
    path = path.resolve()
    hidden = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        check_room(path, needed_bytes)
        with hidden.open("xb") as file:
            yield from _written_and_synced(file)
        hidden.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(error, path, needed_bytes) from error
    finally:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)


def write_file(path: str | Path, content: bytes | str) -> None:
    """Replace a file by this content, text as UTF-8; ResourceError as in `replacing`."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(Path(path), needed_bytes=len(data)) as sink:
        sink.write(data)


def append_text(path: Path, text: str) -> None:
    """Append to a file, which need not exist; ResourceError as in `replacing`."""
    try:
        with path.open("a") as file:
            file.write(text)
    except OSError as error:
        raise write_error(error, path, len(text)) from error


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _written_and_synced(file: IO[bytes]) -> Iterator[Sink]:
    sink = Sink(file)
    try:
        yield sink
    except RuntimeError:
        # Raised by torch's zip writer if `write` returns 0.
        if sink.error is None:
            raise
    if sink.error is not None:
        raise sink.error
    file.flush()
    os.fsync(file.fileno())


def check_room(path: Path, needed_bytes: int) -> None:
    """OSError if the disk of a new file has less room than it needs."""
    if needed_bytes > shutil.disk_usage(path.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_error(error: OSError, path: Path, needed_bytes: int) -> ResourceError:
    """The ResourceError to raise for an OSError that occurred while a file was written."""
    if error.errno == errno.EFBIG:
        return ResourceError(
            f"{path}: the file would have about {needed_bytes:,} bytes, but {_largest_file()}. The existing file is "
            "unchanged. Raise the limit (ulimit -f unlimited) or choose another disk."
        )
    if error.errno == errno.EDQUOT:
        return ResourceError(
            f"{path}: disk quota exceeded: {needed_bytes:,} bytes needed. The existing file is unchanged. Free some "
            "space or choose another folder."
        )
    if error.errno not in _NO_SPACE:
        return ResourceError(f"{path}: cannot be written: {error.strerror}. Check the folder and its permissions.")
    free = f"{shutil.disk_usage(path.parent).free:,}" if path.parent.is_dir() else "none"
    return ResourceError(
        f"{path}: not enough disk space: {needed_bytes:,} bytes needed, {free} free. The existing file is unchanged. "
        "Free some space or choose another folder."
    )


def reason_of(error: OSError | ResourceError) -> str:
    """What the system said about a file that could not be written."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return getattr(cause, "strerror", None) or str(cause)


def file_size_limit() -> int | None:
    """The largest file that this process may write, in bytes (ulimit -f); None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def _largest_file() -> str:
    limit = file_size_limit()
    if limit is None:
        return "this file system does not support files that large"
    return f"this process may write files of at most {limit:,} bytes (ulimit -f)"


def remove_stale_parts(folder: Path) -> None:
    """Remove incomplete files that killed processes left in a run folder and its direct subfolders.

    The caller must hold the lock of the run.
    """
    for path in (*folder.glob(".*.part"), *folder.glob("*/.*.part")):
        found = _PART.fullmatch(path.name)
        if found is not None and not _is_other_process(int(found[1])):
            with suppress(OSError):
                path.unlink()


def _is_other_process(pid: int) -> bool:
    """Whether another process has this id. In containers, ours is often the id of the one that was killed."""
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


def ran_out_of_room(error: ResourceError) -> bool:
    """Whether a file was not written because the disk or quota is full."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_SPACE


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
