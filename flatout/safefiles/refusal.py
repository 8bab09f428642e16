"""Why a file is not read: found deep inside, completed with the file's name at the door (`opening.reading`)."""

import os
import re

AGAIN = "Download or copy it again."
DAMAGED = f"It is damaged. {AGAIN}"
SUSPECT = "It is damaged or made to exhaust the machine: get it again from a source you trust."


class Refusal(Exception):
    """One or two sentences: what is wrong with the file, and what to do. They follow "FILE: "."""


class Budget:
    """How much a file may make us do; what grows faster than the file ends here."""

    def __init__(self, limit: int, what: str) -> None:
        self._left = self._limit = limit
        self._what = what

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise Refusal(f"it holds more than {self._limit:,} {self._what}, far beyond any known network. {SUSPECT}")


def quoted(text: str, most: int = 80) -> str:
    """Text out of the file, short and on one line, with nothing in it that a terminal would obey."""
    shortened = text if len(text) <= most else text[:most] + "..."
    return shortened if re.fullmatch(r"[A-Za-z0-9_.]+", shortened) else repr(shortened)


# Exact reads at an offset, which end in a Refusal where the file is shorter than it says.
#
# Plain reads, no memory map: a file that shrinks while it is read then is an error and not a crash.


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
