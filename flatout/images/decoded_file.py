"""Large JPEG, PNG and TIFF files, decoded into a temporary file that is mapped: their pixels never fill the memory.

    JPEG --simplejpeg writes into the mapping, a thread gives its pages back--> mapping
    PNG  --inflated in pieces--> strips of rows, each made a small PNG for OpenCV --> mapping
    TIFF --some of its own strips, or a row of its own tiles, made a small TIFF for OpenCV--> mapping

The file has no name, and is gone with the mapping. What cannot be decoded this way, for example a damaged file, is left
to the usual decoders.

Dimension key:  H W image   h rows of a strip   C channels as stored
"""

import mmap
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np

from flatout.feed import default_folder
from flatout.images.decoding import open_regular, read_bytes, upright_view
from flatout.images.header import MAX_NUMBERS, Header, TiffTags

GIVE_BACK_EVERY_S = 0.02
"""While a decoder writes into a mapping; it writes a few MB in that time."""
STRIP_BYTES = 1 << 25
"""Decoded size of a strip of a PNG, and of the rows of a TIFF that are decoded at a time, about."""
MAX_BAND_BYTES = 1 << 28
"""Largest strip, or row of tiles, of a TIFF that is decoded this way."""
BAND_PX = 512
"""Rows or columns that are copied at a time from an image that is stored in another order."""
PIECE_BYTES = 1 << 22
"""Size of a read, and of a piece of inflated bytes."""

_PNG_CHANNELS = {0: 1, 2: 3, 6: 4}
"""Channels by colour type of the PNG files that are decoded in strips: grey, RGB and RGBA."""


def decode_into_file(path: str, header: Header) -> np.ndarray | None:
    """The pixels of a JPEG or PNG of 8 bits, or a TIFF of 8 or 16, in a mapped file; None if that fails.

    Read-only, uint8 [H, W, 3], BGR. The file is in the folder of the stores (docs/store.md).
    """
    decoders = {"jpeg": _decode_jpeg, "mpo": _decode_jpeg, "png": _decode_png, "tiff": _decode_tiff}
    if header.format not in decoders or not (header.bits == 8 or (header.bits == 16 and header.format == "tiff")):
        return None
    memory = _new_mapping(3 * header.width * header.height)
    if memory is None or not decoders[header.format](path, header, memory):
        return None
    stored_HW3 = np.ndarray((header.height, header.width, 3), np.uint8, memory)
    upright = upright_view(stored_HW3, header.orientation)
    if header.orientation >= 5:
        # A row of the upright image is a column of the file, and reading it would bring all of the file into memory.
        upright = copied_into_file(upright, memory)
    upright.flags.writeable = False
    return upright


def _new_mapping(num_bytes: int) -> mmap.mmap | None:
    """A mapped file without a name; None if the disk is full."""
    folder = default_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Writing to a page of a mapping that the disk has no room for would kill the process.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return mmap.mmap(file.fileno(), num_bytes)
    return None


def copied_into_file(view_HW3: np.ndarray, memory: mmap.mmap) -> np.ndarray:
    """A copy of a view of `memory` in a mapping of its own, made in bands; the view if there is no room."""
    copy = _new_mapping(view_HW3.nbytes)
    if copy is None:
        return view_HW3
    copy_HW3 = np.ndarray(view_HW3.shape, np.uint8, copy)
    stored_axis = 0 if abs(view_HW3.strides[0]) > abs(view_HW3.strides[1]) else 1
    for first in range(0, copy_HW3.shape[stored_axis], BAND_PX):
        band = (slice(None),) * stored_axis + (slice(first, first + BAND_PX),)
        copy_HW3[band] = view_HW3[band]
        for each in (memory, copy):
            each.madvise(mmap.MADV_DONTNEED)
    return copy_HW3


@contextmanager
def _giving_back(memory: mmap.mmap) -> Iterator[None]:
    """Give the pages of a mapping back to the system again and again; what is in them stays in the file."""
    is_done = threading.Event()

    def give_back() -> None:
        while not is_done.wait(GIVE_BACK_EVERY_S):
            memory.madvise(mmap.MADV_DONTNEED)

    thread = threading.Thread(target=give_back, name="flatout-give-back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
        memory.madvise(mmap.MADV_DONTNEED)


# JPEG


def _decode_jpeg(path: str, header: Header, memory: mmap.mmap) -> bool:
    if header.channels not in (1, 3):
        return False
    try:
        import simplejpeg
    except ImportError:
        return False
    content = read_bytes(path)
    with _giving_back(memory), suppress(ValueError):
        decoded = simplejpeg.decode_jpeg(content, "BGR", buffer=memory)
        return bool(decoded.shape == (header.height, header.width, 3))
    return False


# PNG


def _decode_png(path: str, header: Header, memory: mmap.mmap) -> bool:
    """Decode in strips. A row may refer to the row above, so each strip begins with the last row of the one before."""
    with open_regular(path) as file, suppress(zlib.error, struct.error):
        fd = file.fileno()
        colour, _, _, is_interlaced = struct.unpack(">4B", os.pread(fd, 4, 25))
        if colour not in _PNG_CHANNELS or is_interlaced:
            return False
        channels = _PNG_CHANNELS[colour]
        as_stored = [0] if channels == 1 else [2, 1, 0, 3][:channels]  # red first, transparency last
        row_bytes = 1 + channels * header.width  # the first byte is the filter of the row
        strip_rows = max(1, STRIP_BYTES // row_bytes)
        rows_left, begin = header.height, 0
        above = bytes(row_bytes)
        waiting = bytearray()
        for piece in _inflated(fd):
            waiting += piece
            while rows_left and len(waiting) >= row_bytes * (num_rows := min(strip_rows, rows_left)):
                size = num_rows * row_bytes
                strip_hWC = _unfiltered(above + waiting[:size], header.width, num_rows + 1, colour)
                if strip_hWC is None:
                    return False
                del waiting[:size]
                above = b"\0" + strip_hWC[-1][:, as_stored].tobytes()
                pixels_hW3 = np.ndarray((num_rows, header.width, 3), np.uint8, memory, begin)
                pixels_hW3[:] = strip_hWC[1:, :, :3]  # grey is repeated
                memory.madvise(mmap.MADV_DONTNEED)
                begin += 3 * header.width * num_rows
                rows_left -= num_rows
        return not rows_left
    return False


def _inflated(fd: int) -> Iterator[bytes]:
    """The inflated content of all IDAT chunks, in pieces; ends early if a chunk is cut off, zlib.error if damaged."""
    inflate = zlib.decompressobj()
    offset = 8
    while len(head := os.pread(fd, 8, offset)) == 8:
        length, kind = struct.unpack(">I4s", head)
        offset += 8
        if kind == b"IEND":
            return
        if kind == b"IDAT":
            checksum = zlib.crc32(kind)
            for at in range(offset, offset + length, PIECE_BYTES):
                content = os.pread(fd, min(PIECE_BYTES, offset + length - at), at)
                checksum = zlib.crc32(content, checksum)
                while content:
                    yield inflate.decompress(content, PIECE_BYTES)
                    content = inflate.unconsumed_tail
            if checksum.to_bytes(4, "big") != os.pread(fd, 4, offset + length):
                raise zlib.error("wrong checksum")
        offset += length + 4


def _unfiltered(rows: bytes, width: int, height: int, colour: int) -> np.ndarray | None:
    """Pixels of inflated rows as OpenCV returns them, uint8 [h, W, C], blue first; None if it cannot decode them."""
    import cv2

    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 0)),
        (b"IEND", b""),
    )
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, content in chunks:
        checksum = zlib.crc32(content, zlib.crc32(kind))
        parts += [struct.pack(">I4s", len(content), kind), content, struct.pack(">I", checksum)]
    image: np.ndarray | None = cv2.imdecode(np.frombuffer(b"".join(parts), np.uint8), cv2.IMREAD_UNCHANGED)
    return image if image is None else image.reshape(height, width, -1)


# TIFF

_COMPRESSIONS = {1, 5, 7, 8, 32773, 32946, 50000}
"""None, LZW, JPEG, deflate, PackBits, deflate by its older number, ZSTD: strips and tiles do not need each other."""


class _Chunks(NamedTuple):
    """The strips of a TIFF, or its tiles, row by row."""

    rows: int
    """Rows of pixels in each."""
    across: int
    """Tiles side by side; 1 for strips."""
    offsets: list[int]
    sizes: list[int]
    """In bytes, as stored."""


def _decode_tiff(path: str, header: Header, memory: mmap.mmap) -> bool:
    """Decode in bands: some strips, or a row of tiles. Turned images and separate planes are not decoded this way."""
    import cv2

    with open_regular(path) as file, suppress(struct.error, OSError, OverflowError, cv2.error):
        fd = file.fileno()
        tags = TiffTags(lambda offset, count: os.pread(fd, count, offset))
        chunks = _chunks_of(tags, header)
        if chunks is None or header.orientation != 1:
            return False
        pixels_HW3 = np.ndarray((header.height, header.width, 3), np.uint8, memory)
        per_band = max(1, STRIP_BYTES // (3 * header.width * chunks.rows)) if chunks.across == 1 else chunks.across
        band_rows = chunks.rows * (per_band // chunks.across)
        for band, top in enumerate(range(0, header.height, band_rows)):
            own = slice(band * per_band, (band + 1) * per_band)
            num_rows = min(band_rows, header.height - top)
            if max(3 * header.width * num_rows, sum(chunks.sizes[own])) > MAX_BAND_BYTES:
                return False
            stored = [os.pread(fd, size, at) for at, size in zip(chunks.offsets[own], chunks.sizes[own], strict=True)]
            content = tags.part(header.width, num_rows, chunks.rows, stored)
            band_hW3 = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
            if band_hW3 is None or band_hW3.shape[:2] != (num_rows, header.width):
                return False
            pixels_HW3[top : top + num_rows] = band_hW3
            memory.madvise(mmap.MADV_DONTNEED)
        return True
    return False


def _chunks_of(tags: TiffTags, header: Header) -> _Chunks | None:
    """The strips or tiles, rows without compression as strips of their own; None if they cannot be decoded alone."""
    compression = tags.first("compression") or 1
    if compression not in _COMPRESSIONS or (tags.first("planar") or 1) != 1:
        return None
    tile_width = tags.first("tile_width")
    if tile_width is None:
        rows, across = min(tags.first("strip_rows") or header.height, header.height), 1
        offsets, sizes = tags.numbers("strip_offsets"), tags.numbers("strip_bytes")
    else:
        rows, across = tags.first("tile_rows") or 0, -(-header.width // max(1, tile_width))
        offsets, sizes = tags.numbers("tile_offsets"), tags.numbers("tile_bytes")
    if not rows or not len(offsets) == len(sizes) == across * -(-header.height // rows):
        return None
    if compression == 1 and tile_width is None:
        row_bytes = header.width * header.channels * header.bits // 8
        is_whole = sum(sizes) == row_bytes * header.height and not any(size % row_bytes for size in sizes)
        if not is_whole or header.height > MAX_NUMBERS:
            return None
        strips = zip(offsets, sizes, strict=True)
        offsets = [at for begin, size in strips for at in range(begin, begin + size, row_bytes)]
        rows, sizes = 1, [row_bytes] * header.height
    return _Chunks(rows, across, offsets, sizes)
