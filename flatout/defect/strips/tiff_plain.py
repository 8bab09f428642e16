"""TIFF pages made plain: what tifffile reads only with an extra package becomes an uncompressed page of whole bytes.

So the values are those that are stored, whichever packages are installed. OpenCV unpacks the bytes (of LZW,
and of others for packed integers and floats), but of a page whose rows of bytes it takes for rows of grey pixels: left
to itself it scales 12 bits to 16, inverts MINISWHITE, obeys an orientation, and takes planes one after another for
colours.
"""

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tifffile

_NONE, _LZW = 1, 5
_UNPACKED = (_NONE, _LZW, 8, 32946, 32773)
"""Also deflate and PackBits. Of others, OpenCV makes black pictures."""
_GREY, _RGB = 1, 2
_LONG = 4
_SEPARATE = 2
_UNSIGNED = 1
_DIFFERENCES, _FLOAT_DIFFERENCES = 2, 3
_WHOLE_BITS = (1, 8, 16, 32, 64)
"""Bits per value that tifffile reads by itself."""


def needs_plain(page: "tifffile.TiffPage") -> bool:
    """Whether tifffile alone cannot read a page, but `plain` can make one of it that it can."""
    if page.compression not in _UNPACKED:
        return False
    is_packed = page.bitspersample not in _WHOLE_BITS and page.sampleformat == _UNSIGNED
    return page.compression == _LZW or page.predictor == _FLOAT_DIFFERENCES or is_packed


def plain(content: bytes, page: "tifffile.TiffPage") -> bytes:
    """A TIFF of one page with the values of `page`; ValueError where they cannot be read."""
    is_separate = page.planarconfig == _SEPARATE
    samples, bits, order = page.samplesperpixel, page.bitspersample, page.parent.byteorder
    values = (page.tilewidth if page.is_tiled else page.imagewidth) * (1 if is_separate else samples)
    row_bytes = -(-values * bits // 8)
    if page.is_tiled:
        rows = [page.tilelength] * len(page.dataoffsets)
    else:
        starts = range(0, page.imagelength, page.rowsperstrip)
        rows = [min(page.rowsperstrip, page.imagelength - start) for start in starts] * (samples if is_separate else 1)
    segments = [_uncompressed(content, page, segment, num_rows, row_bytes) for segment, num_rows in enumerate(rows)]
    if bits not in _WHOLE_BITS:
        if page.predictor != 1:
            raise ValueError(f"{bits} bits per value with a predictor")
        segments = [_widened(data, values, bits, order) for data in segments]
        bits = _wide(bits)
    elif page.predictor != 1 and page.dtype is not None:
        each = 1 if is_separate else samples
        restored = {_DIFFERENCES: _summed, _FLOAT_DIFFERENCES: _summed_floats}[page.predictor]
        segments = [restored(data, each, page.dtype.newbyteorder(order)) for data in segments]
    return _file(page, [data.tobytes() for data in segments], bits)


def compression_name(page: "tifffile.TiffPage") -> str:
    return str(getattr(page.compression, "name", page.compression))


def _uncompressed(content: bytes, page: "tifffile.TiffPage", segment: int, num_rows: int, row_bytes: int) -> np.ndarray:
    """A strip or tile as rows of bytes, uint8 [num_rows, row_bytes]."""
    offset, count = page.dataoffsets[segment], page.databytecounts[segment]
    data = content[offset : offset + count]
    if page.compression == _NONE:
        return np.frombuffer(data, np.uint8, num_rows * row_bytes).reshape(num_rows, row_bytes)
    kind = int(page.compression), int(page.fillorder)
    if num_rows * row_bytes % 2 == 0:
        # A row of an odd number of bytes and the next are one of words.
        by = 1 if row_bytes % 2 == 0 else 2
        found = _by_opencv(data, kind, num_rows // by, row_bytes * by // 2, 16)
    else:
        # Of words OpenCV wants all, of bytes it takes what there is: the words that there are tell whether that is all.
        height, width = (num_rows // 2, row_bytes) if num_rows > 1 else (1, row_bytes // 2)
        is_whole = width == 0 or _by_opencv(data, kind, height, width, 16) is not None
        found = _by_opencv(data, kind, num_rows, row_bytes, 8) if is_whole else None
    if found is None:
        raise ValueError(f"part {segment + 1} of its data cannot be uncompressed ({compression_name(page)})")
    return found.reshape(-1).view(np.uint8).reshape(num_rows, row_bytes)


def _by_opencv(data: bytes, kind: tuple[int, int], height: int, width: int, bits: int) -> np.ndarray | None:
    """Compressed data as a picture of grey, uint8 or uint16 [height, width]; None where it does not make one."""
    import cv2

    compression, fillorder = kind
    tags = {
        256: [width],
        257: [height],
        258: [bits],
        259: [compression],
        262: [_GREY],
        266: [fillorder],
        277: [1],
        278: [height],
        279: [len(data)],
    }
    start = len(_header("<", tags | {273: [0]}))
    found = cv2.imdecode(np.frombuffer(_header("<", tags | {273: [start]}) + data, np.uint8), cv2.IMREAD_UNCHANGED)
    is_whole = found is not None and found.shape == (height, width) and found.dtype.itemsize * 8 == bits
    return np.ascontiguousarray(found) if is_whole else None


def _wide(bits: int) -> int:
    return next(wide for wide in (8, 16, 32, 64) if bits <= wide)


def _widened(row_RB: np.ndarray, values: int, bits: int, order: str) -> np.ndarray:
    """Packed integers as integers of whole bytes; rows begin with a byte of their own."""
    bit_RVb = np.unpackbits(row_RB, axis=1, count=values * bits).reshape(len(row_RB), values, bits)
    wide = _wide(bits)
    padded_RVb = np.zeros((len(row_RB), values, wide), np.uint8)
    padded_RVb[..., wide - bits :] = bit_RVb
    return np.packbits(padded_RVb, axis=-1).view(f">u{wide // 8}").astype(f"{order}u{wide // 8}")


def _summed(row_RB: np.ndarray, samples: int, dtype: np.dtype) -> np.ndarray:
    """Values of differences from the pixel to the left."""
    row_RWS = row_RB.view(dtype).reshape(len(row_RB), -1, samples)
    return np.cumsum(row_RWS, axis=1, dtype=row_RWS.dtype.newbyteorder("=")).astype(dtype)


def _summed_floats(row_RB: np.ndarray, samples: int, dtype: np.dtype) -> np.ndarray:
    """Values of differences of bytes, the highest bytes of a row first, then the next (Adobe's technical note 3)."""
    byte_RB = np.cumsum(row_RB.reshape(len(row_RB), -1, samples), axis=1, dtype=np.uint8)
    byte_RbV = byte_RB.reshape(len(row_RB), dtype.itemsize, -1)
    value_RVb = np.ascontiguousarray(byte_RbV.transpose(0, 2, 1))
    return value_RVb.view(dtype.newbyteorder(">")).astype(dtype)


def _file(page: "tifffile.TiffPage", data: list[bytes], bits: int) -> bytes:
    """A TIFF of one page with these strips or tiles, laid out as `page` is."""
    samples = page.samplesperpixel
    offsets_tag, counts_tag = (324, 325) if page.is_tiled else (273, 279)
    tags = {
        256: [page.imagewidth],
        257: [page.imagelength],
        258: [bits] * samples,
        259: [_NONE],
        262: [_RGB if samples > 2 else _GREY],
        277: [samples],
        284: [int(page.planarconfig)],
        339: [int(page.sampleformat)] * samples,
        offsets_tag: [0] * len(data),
        counts_tag: [len(part) for part in data],
    }
    tags |= {322: [page.tilewidth], 323: [page.tilelength]} if page.is_tiled else {278: [page.rowsperstrip]}
    extra = samples - (3 if samples > 2 else 1)
    if extra:
        tags[338] = [0] * extra
    order = page.parent.byteorder
    tags[offsets_tag] = _starts(data, len(_header(order, tags)))
    return _header(order, tags) + b"".join(data)


def _starts(data: list[bytes], first: int) -> list[int]:
    starts = [first]
    for part in data[:-1]:
        starts.append(starts[-1] + len(part))
    return starts


def _header(byteorder: str, tags: dict[int, list[int]]) -> bytes:
    """Everything before the data, all numbers as 32 bits; its length depends on how many they are, not on which."""
    entries, values = [], b""
    values_at = 8 + 2 + 12 * len(tags) + 4
    for tag, numbers in sorted(tags.items()):
        packed = struct.pack(f"{byteorder}{len(numbers)}I", *numbers)
        where = packed if len(numbers) == 1 else struct.pack(f"{byteorder}I", values_at + len(values))
        values += b"" if len(numbers) == 1 else packed
        entries.append(struct.pack(f"{byteorder}HHI", tag, _LONG, len(numbers)) + where)
    mark = b"II" if byteorder == "<" else b"MM"
    start = mark + struct.pack(f"{byteorder}HIH", 42, 8, len(entries))
    return start + b"".join(entries) + struct.pack(f"{byteorder}I", 0) + values
