"""Compressed TIFF pages as OpenCV reads them rightly: their data as it is, under a header of its own.

OpenCV knows codecs that tifffile needs an extra package for, such as LZW, but takes planes that are stored one after
another for colours of one pixel (and hands out whatever was in memory), and of several planes of grey sees the first.
"""

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tifffile

_GREY, _RGB = 1, 2
_LONG = 4
_SEPARATE = 2


def parts_of(content: bytes, page: "tifffile.TiffPage") -> list[bytes]:
    """Files that OpenCV can read, which together are the page: one per plane, or one of colours; [] if it is as it is.

    Of a page whose planes are one after another, each file is a plane. Of pixels of grey planes, the one file says
    that they are colours.
    """
    samples = page.samplesperpixel
    if samples == 1:
        return []
    if page.planarconfig == _SEPARATE:
        each = len(page.dataoffsets) // samples
        return [_file(content, page, range(plane * each, (plane + 1) * each), 1) for plane in range(samples)]
    return [_file(content, page, range(len(page.dataoffsets)), samples)] if page.photometric == _GREY else []


def _file(content: bytes, page: "tifffile.TiffPage", segments: range, samples: int) -> bytes:
    """A TIFF of one page with these segments, strips or tiles, of another."""
    data = [content[page.dataoffsets[i] : page.dataoffsets[i] + page.databytecounts[i]] for i in segments]
    offsets_tag, counts_tag = (324, 325) if page.is_tiled else (273, 279)
    tags = {
        256: [page.imagewidth],
        257: [page.imagelength],
        258: [page.bitspersample] * samples,
        259: [int(page.compression)],
        262: [_GREY if samples == 1 else _RGB],
        277: [samples],
        284: [1],
        317: [int(page.predictor)],
        339: [int(page.sampleformat)] * samples,
        offsets_tag: [0] * len(data),
        counts_tag: [len(part) for part in data],
    }
    tags |= {322: [page.tilewidth], 323: [page.tilelength]} if page.is_tiled else {278: [page.rowsperstrip]}
    if samples > 3:
        tags[338] = [0] * (samples - 3)
    tags[offsets_tag] = _starts(data, len(_header(page.parent.byteorder, tags)))
    return _header(page.parent.byteorder, tags) + b"".join(data)


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
