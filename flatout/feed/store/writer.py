"""Writes a store, item after item, into a file or into memory, until everything is in it or there is no more room."""

import errno
import os

import numpy as np

from flatout.feed.store.file import ALIGNMENT, ENTRY, UNREADABLE, Header, data_offset, head_and_index

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}


class NoRoomError(Exception):
    """Not even the index fits."""


class StoreWriter:
    """Takes items in any order. Pages are written, never touched through a mapping: a full disk is an error here, not
    a SIGBUS. The file is worth nothing before `finish`."""

    def __init__(self, fd: int, *, num_items: int, limit_bytes: int) -> None:
        self._fd = fd
        self._limit_bytes = limit_bytes
        self._begin = self._end = data_offset(num_items)
        self.index = np.zeros(num_items, ENTRY)
        self.stopped_by = ""
        if self._begin > limit_bytes:
            raise NoRoomError(f"the index alone takes {self._begin} bytes")
        try:
            # Reserved first: what is stored later can be worth nothing for lack of an index.
            os.posix_fallocate(fd, 0, self._begin)
        except OSError as error:
            raise _as_no_room(error) from error

    def add(self, index: int, entry: np.ndarray, data: np.ndarray) -> bool:
        """Store an item's bytes, uint8 [nbytes]; False when the store is full and takes no more."""
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        if self._begin + len(data) > self._limit_bytes:
            return True  # would not fit into an empty store either; others will
        if offset + len(data) > self._limit_bytes:
            self.stopped_by = "budget"
            return False
        try:
            _write_all(self._fd, data, offset)
        except OSError as error:
            _as_no_room(error)
            self.stopped_by = "no room"
            return False
        self.index[index] = entry
        self.index["offset"][index] = offset
        self._end = offset + len(data)
        return True

    def leave_out(self, index: int) -> None:
        """Note an item that cannot be decoded."""
        self.index["state"][index] = UNREADABLE

    @property
    def nbytes(self) -> int:
        return self._end

    def finish(self, *, state: str, budget_bytes: int) -> None:
        """Make a whole store of what has been added; see Header."""
        os.ftruncate(self._fd, self._end)
        # A whole store is the same whatever it was allowed to take, so that two builders agree on every byte.
        budget_bytes = budget_bytes if self.stopped_by else 0
        header = Header(state, len(self.index), self._end, budget_bytes, self.stopped_by)
        _write_all(self._fd, np.frombuffer(head_and_index(header, self.index), np.uint8), 0)


def _write_all(fd: int, data: np.ndarray, offset: int) -> None:
    rest = data.data
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _as_no_room(error: OSError) -> NoRoomError:
    if error.errno not in NO_ROOM:
        raise error
    return NoRoomError(error.strerror)
