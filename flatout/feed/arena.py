"""Memory that several processes see, that cannot be torn away, and that leaves nothing behind.

An arena is one nameless file: a memfd, or where that is missing an unlinked file in /dev/shm or the
temporary folder. Every page is reserved before it is used, so a full /dev/shm or a greedy neighbour
can make an allocation fail with a sentence, but never ends a process by SIGBUS. The kernel frees it
with the last process that holds it, however that process ends.
"""

import ctypes
import errno
import logging
import mmap
import os
import resource
import tempfile
import weakref

import numpy as np

from flatout.errors import ResourceError

logger = logging.getLogger(__name__)

PAGE = mmap.ALLOCATIONGRANULARITY

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_MAP_FAILED = ctypes.c_void_p(-1).value


def page_aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Arena:
    """Extents of shared memory in one growing file; offsets mean the same in every process.

    The creator grows it; others attach by descriptor and map an extent when they first look at it.
    Views stay valid after `close()` until they are dropped.
    """

    def __init__(self, fd: int, *, populate: bool = False) -> None:
        """With `populate` pages are entered when an extent is mapped, not one by one as they are written."""
        self.fd = fd
        self._flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._maps: dict[int, np.ndarray] = {}
        self._end = 0

    @classmethod
    def create(cls, nbytes: int) -> "Arena":
        """An arena with a first extent of `nbytes` at offset 0, in the best memory that has room for it."""
        _refuse_beyond_file_limit(page_aligned(nbytes))
        for opener in (_open_memfd, _open_in_dev_shm, _open_in_temporary_folder):
            try:
                fd = opener()
            except (OSError, AttributeError):  # forbidden, or a Python built for an older system
                continue
            arena = cls(fd)
            try:
                arena.grow(nbytes)
            except ResourceError:
                arena.close()
                continue
            return arena
        raise ResourceError(
            f"The feed's slots need {nbytes / 2**20:.0f} MiB, and neither shared memory nor the temporary folder has "
            "that much room. Use a smaller batch or fewer slots."
        )

    def grow(self, nbytes: int) -> int:
        """Reserve and map a new extent; returns its offset. Raises ResourceError if there is no room."""
        offset, length = self._end, page_aligned(nbytes)
        _refuse_beyond_file_limit(offset + length)
        try:
            os.posix_fallocate(self.fd, offset, length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise ResourceError(
                f"Shared memory ran out: {length / 2**20:.0f} MiB more could not be reserved for the feed's slots "
                f"({error.strerror}). Use a smaller batch or fewer slots."
            ) from None
        self._end += length
        self.map(offset, length)
        return offset

    def map(self, offset: int, length: int) -> None:
        """Make the extent at `offset` readable and writable here."""
        self._maps[offset] = _map(self.fd, offset, page_aligned(length), self._flags)

    def extent(self, offset: int, length: int) -> np.ndarray:
        """Bytes [length] of the extent that begins at `offset`, mapped on first use."""
        if offset not in self._maps:
            self.map(offset, length)
        return self._maps[offset][:length]

    def bytes_at(self, offset: int, length: int) -> np.ndarray:
        """Bytes [length] at any offset inside an extent that is mapped here."""
        begin = max(begin for begin in self._maps if begin <= offset)
        return self._maps[begin][offset - begin : offset - begin + length]

    def discard(self, offset: int) -> None:
        """Give the pages of an extent back to the system; nobody may look at it again."""
        memory = self._maps.pop(offset)
        # Where a file system cannot do it, the pages stay until the end.
        _libc.madvise(memory.ctypes.data, memory.nbytes, mmap.MADV_REMOVE)

    @property
    def reserved_bytes(self) -> int:
        """Memory this arena really holds."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._maps.clear()


def _refuse_beyond_file_limit(nbytes: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and nbytes > limit:
        raise ResourceError(
            f"The feed's slots need {nbytes / 2**20:.1f} MiB, and this process may write files of {limit / 2**20:.1f} "
            "MiB at most, shared memory included. Raise the limit: ulimit -f unlimited"
        )


def _map(fd: int, offset: int, length: int, flags: int) -> np.ndarray:
    """Bytes of a file, shared with all who map them, until the array and its views are dropped.

    mmap.mmap would hold a descriptor for each map: a hundred overflowing batches would run out of them.
    """
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"{length} bytes of shared memory could not be mapped")
    memory = (ctypes.c_uint8 * length).from_address(address)
    # Not at exit: the kernel does that, and someone may still be writing.
    weakref.finalize(memory, _libc.munmap, address, length).atexit = False
    return np.ctypeslib.as_array(memory)


def _open_memfd() -> int:
    return os.memfd_create("flatout-feed")


def _open_in_dev_shm() -> int:
    return _open_unlinked("/dev/shm")


def _open_in_temporary_folder() -> int:
    logger.warning(
        "No room in shared memory: batches pass through a file in %s, which may cost disk writes. "
        "Give the container a larger /dev/shm, or use backend='thread'.",
        tempfile.gettempdir(),
    )
    return _open_unlinked(tempfile.gettempdir())


def _open_unlinked(folder: str) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
