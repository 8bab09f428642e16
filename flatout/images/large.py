"""Large images: files are mapped, if need be after decoding them into a temporary file, and more pixels are allowed.

A mapped image is an array like a decoded one, but its pixels are read from the file when they are used, and `release`
gives the memory back. What can neither be mapped nor decoded into a file is decoded in memory, as usual.

Dimension key:  H W image
"""

import mmap
import os
import struct

import numpy as np

from flatout.feed import DecodeError
from flatout.images.decoded_file import copied_into_file, decode_into_file
from flatout.images.decoding import (
    check_declared_size,
    check_size,
    most_pixels,
    open_regular,
    read_facts,
    read_usable,
)
from flatout.images.header import Header, TiffTags

MAX_LARGE_PIXELS = 1 << 30
"""OpenCV's own limit, about 32,000 x 32,000."""
MAX_LARGE_BYTES = 1 << 33
"""Maximum size of a file that is mapped."""


def read_large(path: str) -> np.ndarray:
    """The pixels of a file of up to MAX_LARGE_PIXELS, uint8 [H, W, 3], BGR.

    One that `read_image` refuses for its size is mapped, and then read-only, if its kind allows. Raises OSError or
    DecodeError if a file is not usable.
    """
    facts = read_facts(path)
    header = facts.header
    if header.width * header.height <= most_pixels(header.bits):
        return read_usable(path).image
    mapped = map_image(path, header)
    if mapped is None:
        check_size(header, facts.num_bytes, max_pixels=MAX_LARGE_PIXELS)
        mapped = decode_into_file(path, header)
    return mapped if mapped is not None else read_usable(path, max_pixels=MAX_LARGE_PIXELS).image


def map_image(path: str, header: Header) -> np.ndarray | None:
    """The pixels of an uncompressed file, mapped; None if its kind cannot be mapped: then it has to be decoded.

    These are BMP with 24 bits, and TIFF with 8 bits, three channels and rows in one piece.
    """
    if header.format not in ("bmp", "tiff") or header.bits != 8 or header.channels != 3 or header.orientation != 1:
        return None
    if header.width * header.height > MAX_LARGE_PIXELS:
        return None
    with open_regular(path) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        if size > MAX_LARGE_BYTES:
            raise DecodeError(f"a file of {size >> 20} MiB; at most {MAX_LARGE_BYTES >> 20} MiB are mapped")
        check_declared_size(header, size)
        found = _bmp_rows(fd, header) if header.format == "bmp" else _tiff_rows(fd, header)
        if found is None:
            return None
        begin, row_bytes, is_bottom_up, is_rgb = found
        if begin + (header.height - 1) * row_bytes + 3 * header.width > size:
            return None  # cut off: the decoder decides what to make of it
        memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    rows = np.ndarray(
        (header.height, header.width, 3), np.uint8, memory, offset=begin, strides=(row_bytes, 3, 1)
    )  # fmt: skip
    rows = rows[::-1] if is_bottom_up else rows
    return rows[..., ::-1] if is_rgb else rows


def release(image_HWC: np.ndarray) -> None:
    """Give back the memory of a mapped image; its pixels are read again when they are used. Others are left alone."""
    if (memory := _mapping_of(image_HWC)) is not None:
        memory.madvise(mmap.MADV_DONTNEED)


def in_opencv_order(image_HWC: np.ndarray) -> np.ndarray:
    """A mapped image whose rows or channels are stored in another order, copied into a mapped file; others as they are.

    OpenCV would copy all of it into memory.
    """
    memory = _mapping_of(image_HWC)
    is_in_order = image_HWC.strides[0] > 0 and image_HWC.strides[2] > 0
    return image_HWC if memory is None or is_in_order else copied_into_file(image_HWC, memory)


def _mapping_of(image_HWC: np.ndarray) -> mmap.mmap | None:
    base: object = image_HWC
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _bmp_rows(fd: int, header: Header) -> tuple[int, int, bool, bool] | None:
    """Offset of the first row, bytes per row, whether the last row comes first, whether red does."""
    head = os.pread(fd, 34, 0)
    if len(head) < 34:
        return None
    (begin,) = struct.unpack_from("<I", head, 10)
    size, _, height, _, bits, compression = struct.unpack_from("<IiiHHI", head, 14)
    if size < 40 or bits != 24 or compression != 0:
        return None
    return begin, (3 * header.width + 3) // 4 * 4, height > 0, False


def _tiff_rows(fd: int, header: Header) -> tuple[int, int, bool, bool] | None:
    """As `_bmp_rows`, for a TIFF whose strips follow each other without gaps."""
    wanted = {"compression": [1], "photometric": [2], "planar": [1], "predictor": [1], "bits": [8, 8, 8]}
    try:
        tags = TiffTags(lambda offset, count: os.pread(fd, count, offset))
        found = {name: tags.numbers(name) for name in (*wanted, "strip_offsets", "strip_bytes")}
    except (struct.error, OSError, OverflowError):
        return None
    may_be_missing = ("compression", "planar", "predictor")
    if any(found[name] != plain and (found[name] or name not in may_be_missing) for name, plain in wanted.items()):
        return None
    offsets, counts = found["strip_offsets"], found["strip_bytes"]
    if not offsets or len(offsets) != len(counts):
        return None
    row_bytes = 3 * header.width
    has_gaps = any(at + count != after for at, count, after in zip(offsets, counts, offsets[1:], strict=False))
    is_whole = sum(counts) == row_bytes * header.height and not any(count % row_bytes for count in counts)
    return (offsets[0], row_bytes, False, True) if is_whole and not has_gaps else None
