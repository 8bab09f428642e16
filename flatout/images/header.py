"""Format, size and orientation of an image file from its first bytes, without decoding pixels.

File names are ignored. Nothing in the file is trusted either: every read is bounded, and any inconsistency is a
DecodeError.
"""

import re
import struct
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from flatout.feed import DecodeError

# TIFF directories; EXIF is one too, read as OpenCV reads it

MAX_ENTRIES = 512
MAX_NUMBERS = 1 << 20
"""Most numbers of one tag: the strips of a large image."""

_TAGS = {
    "width": 256,
    "height": 257,
    "bits": 258,
    "compression": 259,
    "photometric": 262,
    "strip_offsets": 273,
    "orientation": 274,
    "samples": 277,
    "strip_rows": 278,
    "strip_bytes": 279,
    "planar": 284,
    "predictor": 317,
    "tile_width": 322,
    "tile_rows": 323,
    "tile_offsets": 324,
    "tile_bytes": 325,
    "dng_version": 50706,
}
_EXIF_TEXTS = {270, 271, 272, 305, 306, 33432}
_EXIF_FRACTIONS = {282: 1, 283: 1, 318: 2, 319: 6, 529: 3, 532: 6}
_LETTERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
_LONG = 4
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 16: 8}
_DECODING_TAGS = (258, 259, 262, 266, 277, 284, 317, 320, 338, 339, 347, 529, 530, 531, 532)
"""How pixels are stored: bits, compression, colours, predictor, transparency, palette, tables of a JPEG."""
MAX_TAG_BYTES = 1 << 20


class TiffTags:
    """The first directory of a TIFF, classic or BigTIFF; raises struct.error if it is truncated."""

    def __init__(self, read_at: Callable[[int, int], bytes]) -> None:
        start = read_at(0, 16)
        self._order = {b"II": "<", b"MM": ">"}.get(start[:2], "")
        if not self._order:
            raise struct.error("no byte order")
        (magic,) = struct.unpack(f"{self._order}H", start[2:4])
        big = magic == 43
        # Offset of the directory, then struct formats of: number of entries, one entry, offset of the next directory.
        (offset,) = struct.unpack(f"{self._order}{'Q' if big else 'I'}", start[8:16] if big else start[4:8])
        count, entry, after = ("Q", "HHQ8s", "Q") if big else ("H", "HHI4s", "I")
        count_bytes, entry_bytes = (struct.calcsize(f"{self._order}{each}") for each in (count, entry))
        (num_entries,) = struct.unpack(f"{self._order}{count}", read_at(offset, count_bytes))
        if num_entries > MAX_ENTRIES:
            raise struct.error("too many entries")
        table = read_at(offset + count_bytes, num_entries * entry_bytes)
        self._entries = {tag: rest for tag, *rest in struct.iter_unpack(f"{self._order}{entry}", table)}
        rest = read_at(offset + count_bytes + num_entries * entry_bytes, struct.calcsize(f"{self._order}{after}"))
        self.next_page = any(rest)
        self._read_at = read_at

    def numbers(self, name: str, most: int = MAX_NUMBERS) -> list[int]:
        """The first `most` numbers of a tag: in its entry, or at the offset in the entry."""
        kind, length, value = self._entries.get(_TAGS[name], (0, 0, b""))
        if kind not in _LETTERS:
            return []
        numbers = struct.Struct(f"{self._order}{min(length, most)}{_LETTERS[kind]}")
        if length * struct.calcsize(f"={_LETTERS[kind]}") > len(value):
            (at,) = struct.unpack(f"{self._order}{'Q' if len(value) == 8 else 'I'}", value)
            value = self._read_at(at, numbers.size)
        return list(numbers.unpack(value[: numbers.size]))

    def first(self, name: str) -> int | None:
        """The first number of a tag."""
        return next(iter(self.numbers(name, 1)), None)

    def part(self, width: int, height: int, chunk_rows: int, chunks: Sequence[bytes]) -> bytes:
        """A small TIFF of some rows of this one, whose strips or tiles are `chunks`, as they are stored in this one.

        struct.error if what says how its pixels are stored is damaged.
        """
        sizes = [len(chunk) for chunk in chunks]
        kind = "strip" if (tile_width := self.first("tile_width")) is None else "tile"
        numbers = {"width": [width], "height": [height], f"{kind}_rows": [chunk_rows]}
        numbers |= {f"{kind}_bytes": sizes, f"{kind}_offsets": sizes}
        numbers |= {} if tile_width is None else {"tile_width": [tile_width]}
        entries = {tag: self._raw(tag) for tag in _DECODING_TAGS if tag in self._entries}
        entries |= {_TAGS[name]: (_LONG, len(each), self._longs(each)) for name, each in numbers.items()}
        # The directory follows the header, then come values that do not fit into their entries, then the chunks.
        values_at = 8 + 2 + 12 * len(entries) + 4
        chunks_at = values_at + sum(len(value) for *_, value in entries.values() if len(value) > 4)
        offsets = [chunks_at + before for before in accumulate(sizes, initial=0)][:-1]
        entries[_TAGS[f"{kind}_offsets"]] = (_LONG, len(offsets), self._longs(offsets))
        directory, values = b"", b""
        for tag, (type_number, length, value) in sorted(entries.items()):
            if len(value) > 4:
                value, values = self._longs([values_at + len(values)]), values + value
            directory += struct.pack(f"{self._order}HHI4s", tag, type_number, length, value)
        start = {"<": b"II", ">": b"MM"}[self._order] + struct.pack(f"{self._order}HIH", 42, 8, len(entries))
        return b"".join((start, directory, bytes(4), values, *chunks))

    def _raw(self, tag: int) -> tuple[int, int, bytes]:
        """Type, number of values and bytes of a tag."""
        type_number, length, value = self._entries[tag]
        size = length * _TYPE_BYTES.get(type_number, MAX_TAG_BYTES + 1)
        if size > MAX_TAG_BYTES:
            raise struct.error("a value that is too long")
        if size > len(value):
            (at,) = struct.unpack(f"{self._order}{'Q' if len(value) == 8 else 'I'}", value)
            value = self._read_at(at, size)
        return type_number, length, value[:size]

    def _longs(self, numbers: Sequence[int]) -> bytes:
        return struct.pack(f"{self._order}{len(numbers)}I", *numbers)


def orientation_in(exif: bytes) -> int | None:
    """EXIF's orientation as OpenCV reads it: 1 if there is none, None if no entry can be read.

    The first orientation entry counts, whatever type it declares. Entries after one that points outside the block are
    not read; those before it are.
    """
    order = {b"II": "<", b"MM": ">"}.get(exif[:2], "")
    found: int | None = None
    try:
        magic, directory = struct.unpack_from(f"{order}HI", exif, 2)
        if not order or magic != 42:
            return None
        (num_entries,) = struct.unpack_from(f"{order}H", exif, directory)
        for at in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            (tag,) = struct.unpack_from(f"{order}H", exif, at)
            if tag == _TAGS["orientation"]:
                (value,) = struct.unpack_from(f"{order}H", exif, at + 8)
                return value if 1 <= value <= 8 else 1
            _check_entry(exif, order, tag, at)
            found = 1
    except struct.error:
        pass
    return found


def _check_entry(exif: bytes, order: str, tag: int, at: int) -> None:
    """Raise struct.error if an entry that OpenCV reads points outside the block."""
    if tag in _EXIF_TEXTS:
        length, offset = struct.unpack_from(f"{order}II", exif, at + 4)
        if length > 4:
            struct.unpack_from(f"{length}x", exif, offset)
    elif tag in _EXIF_FRACTIONS:
        (offset,) = struct.unpack_from(f"{order}I", exif, at + 8)
        struct.unpack_from(f"{8 * _EXIF_FRACTIONS[tag]}x", exif, offset)


# Headers

ReadAt = Callable[[int, int], bytes]
"""(offset, count) -> that part of a file; shorter or empty at the end of the file."""

READABLE = ("jpeg", "png", "bmp", "webp", "tiff", "dng", "mpo")
NOT_IMAGES = ("unknown", "pdf", "html", "zip")
NOT_OPENED = (*NOT_IMAGES, "heic", "svg")
"""Formats that Pillow, and therefore YOLOv7, cannot open. Pillow opens the others, but YOLOv7 rejects their format."""
FORMATS = ("unknown", *READABLE, "gif", "jpeg2000", "avif", "heic", "psd", "ico", "pdf", "svg", "html", "zip", "ppm")
"""All formats that are recognised; those not in READABLE only get a better error message."""
MAX_SEGMENTS = 1 << 16
MAX_STRAY_BYTES = 1 << 26
"""Maximum number of stray bytes between two segments of a JPEG."""
MAX_EXIF_BYTES = 1 << 16
TAIL_BYTES = 4096
"""Number of bytes at the end of a PNG that are searched for EXIF."""
DEFLATE_FACTOR = 1032
"""Largest expansion of a deflate stream, as in a PNG."""
JPEG_PIXELS_PER_BYTE = 4_000
"""Maximum pixels per byte of a JPEG. A block of 8 x 8 takes at least a bit, and most of an image is not of one colour,
so a header that declares more is wrong."""

_STANDALONE = {0x01, *range(0xD0, 0xD9)}
_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_ENDS = {0xDA: "its pixels begin without one", 0xD9: "it ends before one"}
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_STRAY_BLOCK = 1 << 16
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_PNG_SAMPLES = {**_PNG_CHANNELS, 3: 1}
"""Stored values per pixel: a palette index is one value."""


class Header(NamedTuple):
    """The header of an image file."""

    format: str
    width: int = 0
    height: int = 0
    """As stored, before the orientation is applied."""
    orientation: int = 1
    """EXIF orientation, 1 to 8; from 5 on, width and height are swapped."""
    bits: int = 8
    channels: int = 3
    """4 channels of a JPEG are CMYK; otherwise the last of 2 or 4 is transparency."""
    pages: int = 1
    """Number of pages or frames; 2 means several."""
    least_bytes: int = 0
    """Minimum size of a file with this many pixels; 0 if the format has no such limit."""

    @property
    def size_wh(self) -> tuple[int, int]:
        """Width and height after the orientation is applied."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def header_of(content: bytes | memoryview) -> Header:
    """Header of a file in memory; see `read_header`."""
    return read_header(lambda offset, count: bytes(content[offset : offset + count]), len(content))


def read_header(read_at: ReadAt, num_bytes: int) -> Header:
    """Header of a file of `num_bytes`; raises DecodeError if it begins like an image but its header is invalid."""
    start = read_at(0, 32)
    kind = sniff(start)
    if kind not in _READERS:
        return Header(kind)
    try:
        header = _READERS[kind](read_at, num_bytes)
    except DecodeError:
        raise
    except (struct.error, IndexError, ValueError) as error:
        raise DecodeError(f"the {kind.upper()} header is cut off or damaged") from error
    if header.width < 1 or header.height < 1:
        raise DecodeError(f"the {kind.upper()} header gives a size of {header.width} x {header.height}")
    return header


def sniff(start: bytes) -> str:
    """Format of a file, one of FORMATS, from its first 32 bytes."""
    for kind, magics in _MAGIC.items():
        if start.startswith(magics):
            return kind
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "webp"
    if start[4:8] == b"ftyp":
        return "avif" if start[8:12] in (b"avif", b"avis") else "heic"
    if start[:1] == b"P" and start[1:2] in b"123456" and start[2:3].isspace():
        return "ppm"
    head = start.lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html")):
        return "html"
    return "svg" if head.startswith((b"<svg", b"<?xml")) else "unknown"


_MAGIC: dict[str, bytes | tuple[bytes, ...]] = {
    "jpeg": b"\xff\xd8\xff",
    "png": b"\x89PNG\r\n\x1a\n",
    "bmp": b"BM",
    "tiff": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "gif": (b"GIF87a", b"GIF89a"),
    "jpeg2000": (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
    "psd": b"8BPS",
    "ico": b"\0\0\x01\0",
    "pdf": b"%PDF",
    "zip": b"PK\x03\x04",
}


def _jpeg(read_at: ReadAt, num_bytes: int) -> Header:
    """Read segment by segment like libjpeg, which skips fill bytes and stray bytes between segments."""
    offset, is_mpo, frame, end = 2, False, None, ""
    orientation: int | None = None
    for _ in range(MAX_SEGMENTS):
        offset, marker = _next_marker(read_at, offset)
        if marker in _STANDALONE:
            continue
        if marker in _JPEG_ENDS:
            end = _JPEG_ENDS[marker]
            break
        (length,) = struct.unpack(">H", read_at(offset, 2))
        body = offset + 2
        # The first readable EXIF block counts, even if it has no orientation.
        if marker == 0xE1 and orientation is None and read_at(body, 6) == b"Exif\0\0":
            orientation = orientation_in(read_at(body + 6, length - 8))
        elif marker == 0xE2 and read_at(body, 4) == b"MPF\0":
            is_mpo = True
        elif marker in _FRAMES and frame is None:
            frame = struct.unpack(">BHHB", read_at(body, 6))
        offset += max(length, 2)
    if frame is None:
        raise DecodeError(f"a JPEG without a frame header: {end or f'none in {MAX_SEGMENTS:,} segments'}")
    bits, height, width, channels = frame
    kind = "mpo" if is_mpo else "jpeg"
    least = width * height // JPEG_PIXELS_PER_BYTE
    return Header(kind, width, height, orientation or 1, bits, channels, 2 if is_mpo else 1, least)


def _next_marker(read_at: ReadAt, offset: int) -> tuple[int, int]:
    """Offset after the next marker, and its code. A marker is 0xFF and a byte that is neither 0 nor 0xFF."""
    head = read_at(offset, 2)
    if _MARKER.match(head):
        return offset + 2, head[1]
    for begin in range(offset, offset + MAX_STRAY_BYTES, _STRAY_BLOCK):
        block = read_at(begin, _STRAY_BLOCK + 1)  # one more, so that no marker is split
        if found := _MARKER.search(block):
            return begin + found.end(), block[found.end() - 1]
        if len(block) <= _STRAY_BLOCK:
            break
    raise DecodeError("the JPEG header is cut off or damaged: no segment begins after the last one")


def _png(read_at: ReadAt, num_bytes: int) -> Header:
    width, height, bits, colour = struct.unpack(">IIBB", read_at(16, 10))
    if read_at(12, 4) != b"IHDR" or colour not in _PNG_CHANNELS:
        raise DecodeError("a PNG without a valid first chunk")
    offset, exif, pages, alpha = 33, b"", 1, False
    for _ in range(MAX_SEGMENTS):
        length, kind = struct.unpack(">I4s", read_at(offset, 8))
        if kind == b"eXIf" and not exif:
            exif = _png_exif(read_at(offset, length + 12) if length <= MAX_EXIF_BYTES else b"")
        elif kind == b"acTL":
            pages = 2
        elif kind == b"tRNS":
            alpha = True
        elif kind in (b"IDAT", b"IEND"):
            break
        offset += 12 + length
    if not exif:  # it may also come after the pixels
        tail = read_at(max(offset, num_bytes - TAIL_BYTES), TAIL_BYTES)
        at = tail.rfind(b"eXIf") - 4
        exif = _png_exif(tail[at:]) if at >= 0 else b""
    channels = _PNG_CHANNELS[colour] + (alpha and colour in (0, 2, 3))
    row_bytes = 1 + (width * _PNG_SAMPLES[colour] * bits + 7) // 8
    least = row_bytes * height // DEFLATE_FACTOR
    return Header("png", width, height, orientation_in(exif) or 1, bits, channels, pages, least_bytes=least)


def _png_exif(chunk: bytes) -> bytes:
    """Content of a chunk; empty if its checksum is wrong, as in libpng."""
    length = int.from_bytes(chunk[:4], "big")
    content, checksum = chunk[8 : 8 + length], chunk[8 + length : 12 + length]
    is_whole = len(checksum) == 4 and zlib.crc32(b"eXIf" + content) == int.from_bytes(checksum, "big")
    return content if is_whole else b""


def _bmp(read_at: ReadAt, num_bytes: int) -> Header:
    (size,) = struct.unpack("<I", read_at(14, 4))
    compression = 0
    if size == 12:
        width, height, _, bits = struct.unpack("<HHHH", read_at(18, 8))
    elif size >= 40:
        width, height, _, bits, compression = struct.unpack("<iiHHI", read_at(18, 16))
    else:
        raise DecodeError(f"a BMP with a header of {size} bytes")
    height = abs(height)  # bottom-up or top-down
    # 1 and 2 are run-length compressed; the other values mean bit fields. The last row may be incomplete.
    least = 0 if compression in (1, 2) else (width * bits + 31) // 32 * 4 * (height - 1)
    return Header("bmp", width, height, channels=4 if bits == 32 else 3, least_bytes=least)


def _webp(read_at: ReadAt, num_bytes: int) -> Header:
    kind = read_at(12, 4)
    if kind == b"VP8 ":
        if read_at(23, 3) != b"\x9d\x01\x2a":
            raise DecodeError("a WebP whose first frame is not a key frame")
        width, height = struct.unpack("<HH", read_at(26, 4))
        return Header("webp", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        (bits,) = struct.unpack("<I", read_at(21, 4))
        return Header("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, channels=4 if bits >> 28 & 1 else 3)
    if kind != b"VP8X":
        raise DecodeError(f"a WebP that begins with a chunk {kind!r}")
    flags, body = read_at(20, 1)[0], read_at(24, 6)
    width, height = int.from_bytes(body[:3], "little") + 1, int.from_bytes(body[3:6], "little") + 1
    orientation = _webp_orientation(read_at) if flags & 0x08 else 1
    return Header("webp", width, height, orientation, 8, 4 if flags & 0x10 else 3, 2 if flags & 0x02 else 1)


def _webp_orientation(read_at: ReadAt) -> int:
    offset = 12
    for _ in range(MAX_SEGMENTS):
        head = read_at(offset, 8)
        if len(head) < 8:
            return 1
        kind, length = struct.unpack("<4sI", head)
        if kind == b"EXIF":
            # Some programs write JPEG's "Exif\0\0" before the block: OpenCV then ignores it, and so does this.
            return orientation_in(read_at(offset + 8, min(length, MAX_EXIF_BYTES))) or 1
        offset += 8 + length + (length & 1)
    return 1


def _tiff(read_at: ReadAt, num_bytes: int) -> Header:
    tags = TiffTags(read_at)
    width, height = tags.first("width"), tags.first("height")
    if width is None or height is None:
        raise DecodeError("a TIFF without a size")
    orientation = tags.first("orientation") or 1
    bits, samples = tags.first("bits") or 1, min(tags.first("samples") or 1, MAX_ENTRIES)
    is_plain = tags.first("compression") in (None, 1)
    return Header(
        "dng" if tags.first("dng_version") is not None else "tiff",
        width,
        height,
        orientation if 1 <= orientation <= 8 else 1,
        bits,
        samples,
        2 if tags.next_page else 1,
        least_bytes=(height - 1) * ((width * bits * samples + 7) // 8) if is_plain else 0,
    )


def _gif(read_at: ReadAt, num_bytes: int) -> Header:
    return Header("gif", *struct.unpack("<HH", read_at(6, 4)))


_READERS: dict[str, Callable[[ReadAt, int], Header]] = {
    "jpeg": _jpeg,
    "png": _png,
    "bmp": _bmp,
    "webp": _webp,
    "tiff": _tiff,
    "gif": _gif,
}
