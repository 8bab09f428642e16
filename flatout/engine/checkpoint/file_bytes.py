"""Exact reads at an offset, which end in a Refusal where the file is shorter than it says.

Plain reads, no memory map: a file that shrinks while it is read then is an error and not a crash.
"""

import os

from flatout.engine.checkpoint.refusal import AGAIN, Refusal


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Exactly these bytes; `nbytes` is allocated at once, so the caller has compared it with the file's size."""
    content = os.pread(fd, nbytes, offset) if offset < 1 << 62 else b""
    if len(content) != nbytes:
        raise _cut_off(nbytes, offset)
    return content


def read_into(fd: int, out: memoryview, offset: int) -> None:
    """Fill `out`, writable bytes."""
    done = 0
    # One call reads at most 2 GiB.
    while done < len(out):
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            raise _cut_off(len(out), offset)
        done += count


def _cut_off(nbytes: int, offset: int) -> Refusal:
    return Refusal(f"is cut off: {nbytes:,} bytes at {offset:,} are not there. {AGAIN}")
