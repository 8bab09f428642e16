"""Is a store still what its input files say? Reads every byte of both, which is why it is done on demand only."""

import zlib
from concurrent.futures import ThreadPoolExecutor

from flatout.feed.store.file import StoreFile
from flatout.feed.store.items import Items


def first_difference(file: StoreFile, items: Items, *, num_threads: int) -> str:
    """One sentence about the first item that is damaged or whose input has another content; "" if there is none."""

    def look_at(index: int) -> str:
        if not file.holds(index):
            return ""
        if not file.is_intact(index):
            return f"the stored bytes of {items.where(index)} are damaged"
        is_same = crc_of_file(items.path(index)) == int(file.index["source_crc"][index])
        return "" if is_same else f"{items.where(index)} is gone or has another content than when it was decoded"

    # Threads: zlib computes without the GIL.
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        return next(filter(None, pool.map(look_at, range(len(file)))), "")


def crc_of_file(path: str) -> int:
    """CRC-32 of a file's bytes; 0 for what is no file, such as a member of an archive."""
    crc = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
    except OSError:
        return 0
    return crc
