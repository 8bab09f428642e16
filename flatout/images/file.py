"""A picture file on disk: opened without traps, its header read, its end looked at."""

import os
import stat
import zlib
from typing import NamedTuple

from flatout.feed import DecodeError
from flatout.images.header import Header, ReadAt, read_header

WINDOW_BYTES = 4096
"""Read at once: enough for the header of most files, and one page of the disk cache."""
MOST_BYTES = 1 << 30
"""Of one picture file."""


class Facts(NamedTuple):
    """What can be known about a picture without decoding it."""

    header: Header
    ending: str
    """"whole", "absent" (no end marker where there should be one) or "more" (bytes after the end)."""
    num_bytes: int
    """Size of the file in bytes."""


def read_facts(path: str, *, verify: bool = False) -> Facts:
    """Header and end of a picture; `verify` reads all of a PNG and compares its checksums.

    Raises OSError for a file that cannot be opened, DecodeError for one that is no picture.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise DecodeError("an empty file")
        header = read_header(_Window(fd), size)
        if verify and header.format == "png":
            check_png(lambda offset, count: os.pread(fd, count, offset), size)
        return Facts(header, _ending(fd, size, header.format), size)
    finally:
        os.close(fd)


def read_bytes(path: str) -> bytes:
    """All of a picture file."""
    fd = open_regular(path)
    with open(fd, "rb") as file:
        if (size := os.fstat(fd).st_size) > MOST_BYTES:
            raise DecodeError(f"a file of {size >> 20} MiB; {MOST_BYTES >> 20} MiB is the most that is read")
        return file.read()


def open_regular(path: str) -> int:
    """A descriptor of a regular file; a FIFO or device, on which reading could wait for ever, is an OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in the name
        raise OSError(f"not a possible file name: {error}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return fd


class _Window:
    """Reads of a file, answered from its first page where they lie in it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = os.pread(fd, WINDOW_BYTES, 0)

    def __call__(self, offset: int, count: int) -> bytes:
        if count <= 0:
            return b""
        if offset + count <= len(self._start):
            return self._start[offset : offset + count]
        # Offsets come from the file and may be anything; pread takes what fits into 63 bits.
        return os.pread(self._fd, count, offset) if offset < 1 << 62 else b""


def _ending(fd: int, size: int, kind: str) -> str:
    mark = {"jpeg": b"\xff\xd9", "png": b"IEND\xaeB`\x82"}.get(kind)
    if mark is None:
        return "whole"
    tail = os.pread(fd, WINDOW_BYTES, max(0, size - WINDOW_BYTES))
    if tail.endswith(mark):
        return "whole"
    return "more" if mark in tail else "absent"


def check_png(read_at: ReadAt, size: int) -> None:
    """DecodeError unless every chunk is whole and has the right checksum, as far as IEND."""
    offset = 8
    while offset < size:
        head = read_at(offset, 8)
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if len(head) < 8 or offset + 12 + length > size:
            raise DecodeError("a PNG that is cut off")
        content = read_at(offset + 8, length + 4)
        if zlib.crc32(kind + content[:length]) != int.from_bytes(content[length:], "big"):
            raise DecodeError(f"a PNG whose chunk {kind!r} has a wrong checksum")
        if kind == b"IEND":
            return
        offset += 12 + length
    raise DecodeError("a PNG that is cut off")
