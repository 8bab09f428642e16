"""What is this picture, by its first bytes: format, size, orientation - without decoding a pixel.

The name of a file says nothing that counts. Nothing in the file is trusted either: every read is bounded, and what
does not add up is a DecodeError.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

from flatout.feed import DecodeError
from flatout.images.tiff_tags import MOST_ENTRIES, TiffTags, orientation_in

ReadAt = Callable[[int, int], bytes]
"""(offset, count) -> that part of a file; shorter, or empty, where the file ends."""

READABLE = ("jpeg", "png", "bmp", "webp", "tiff", "dng", "mpo")
NO_PICTURES = ("unknown", "pdf", "html", "zip")
NOT_OPENED = (*NO_PICTURES, "heic", "svg")
"""What Pillow does not know, by which YOLOv7 judges; the others it opens, and YOLOv7 then refuses their format."""
FORMATS = ("unknown", *READABLE, "gif", "jpeg2000", "avif", "heic", "psd", "ico", "pdf", "svg", "html", "zip", "ppm")
"""Everything that is recognised; what is not in READABLE only gets a better error text."""
MOST_SEGMENTS = 2000

_STANDALONE = {0x01, *range(0xD0, 0xD9)}
_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}


class Header(NamedTuple):
    """What the first bytes say."""

    format: str
    width: int = 0
    height: int = 0
    """As stored, before the orientation is obeyed."""
    orientation: int = 1
    """EXIF's 1 to 8; from 5 on, width and height change places."""
    bits: int = 8
    channels: int = 3
    """4 of a JPEG are CMYK, else the last of 2 or 4 is transparency."""
    pages: int = 1
    """2 stands for several."""
    progressive: bool = False

    @property
    def size_wh(self) -> tuple[int, int]:
        """Width and height once the orientation is obeyed."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def header_of(content: bytes | memoryview) -> Header:
    """Of a file that is in memory."""
    return read_header(lambda offset, count: bytes(content[offset : offset + count]))


def read_header(read_at: ReadAt) -> Header:
    """DecodeError if the file begins like a picture but does not go on like one."""
    start = read_at(0, 32)
    kind = sniff(start)
    if kind not in _READERS:
        return Header(kind)
    try:
        header = _READERS[kind](read_at)
    except DecodeError:
        raise
    except (struct.error, IndexError, ValueError) as error:
        raise DecodeError(f"the {kind.upper()} header is cut off or damaged") from error
    if header.width < 1 or header.height < 1:
        raise DecodeError(f"the {kind.upper()} header gives a size of {header.width} x {header.height}")
    return header


def sniff(start: bytes) -> str:
    """One of FORMATS, by the first 32 bytes."""
    for magic, kind in _MAGIC:
        if start.startswith(magic):
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


_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"BM", "bmp"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"II+\0", "tiff"),
    (b"MM\0+", "tiff"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"\0\0\0\x0cjP  ", "jpeg2000"),
    (b"\xff\x4f\xff\x51", "jpeg2000"),
    (b"8BPS", "psd"),
    (b"\0\0\x01\0", "ico"),
    (b"%PDF", "pdf"),
    (b"PK\x03\x04", "zip"),
)


def _jpeg(read_at: ReadAt) -> Header:
    offset, orientation, is_mpo, frame = 2, 1, False, None
    for _ in range(MOST_SEGMENTS):
        prefix, marker = read_at(offset, 2)
        if prefix != 0xFF:
            break
        if marker == 0xFF or marker in _STANDALONE:  # fill bytes, restart markers
            offset += 1 if marker == 0xFF else 2
            continue
        if marker in (0xDA, 0xD9):  # pixels, or the end
            break
        (length,) = struct.unpack(">H", read_at(offset + 2, 2))
        body = offset + 4
        if marker == 0xE1 and orientation == 1 and read_at(body, 6) == b"Exif\0\0":
            orientation = orientation_in(read_at(body + 6, length - 8))
        elif marker == 0xE2 and read_at(body, 4) == b"MPF\0":
            is_mpo = True
        elif marker in _FRAMES and frame is None:
            frame = (*struct.unpack(">BHHB", read_at(body, 6)), marker in _PROGRESSIVE)
        offset += 2 + length
    if frame is None:
        raise DecodeError("a JPEG without a frame: it was cut off before the first pixel")
    bits, height, width, channels, progressive = frame
    kind = "mpo" if is_mpo else "jpeg"
    return Header(kind, width, height, orientation, bits, channels, 2 if is_mpo else 1, progressive)


def _png(read_at: ReadAt) -> Header:
    width, height, bits, colour = struct.unpack(">IIBB", read_at(16, 10))
    if read_at(12, 4) != b"IHDR" or colour not in _PNG_CHANNELS:
        raise DecodeError("a PNG without a proper first chunk")
    offset, orientation, pages, alpha = 33, 1, 1, False
    for _ in range(MOST_SEGMENTS):
        length, kind = struct.unpack(">I4s", read_at(offset, 8))
        if kind == b"eXIf":
            orientation = orientation_in(read_at(offset + 8, min(length, 1 << 16)))
        elif kind == b"acTL":
            pages = 2
        elif kind == b"tRNS":
            alpha = True
        elif kind in (b"IDAT", b"IEND"):
            break
        offset += 12 + length
    channels = _PNG_CHANNELS[colour] + (alpha and colour in (0, 2, 3))
    return Header("png", width, height, orientation, bits, channels, pages)


def _bmp(read_at: ReadAt) -> Header:
    (size,) = struct.unpack("<I", read_at(14, 4))
    if size == 12:
        width, height, _, bits = struct.unpack("<HHHH", read_at(18, 8))
    elif size >= 40:
        width, height, _, bits = struct.unpack("<iiHH", read_at(18, 12))
    else:
        raise DecodeError(f"a BMP with a header of {size} bytes")
    return Header("bmp", width, abs(height), channels=4 if bits == 32 else 3)  # bottom-up or top-down


def _webp(read_at: ReadAt) -> Header:
    kind = read_at(12, 4)
    if kind == b"VP8 ":
        if read_at(23, 3) != b"\x9d\x01\x2a":
            raise DecodeError("a WebP whose first frame is no key frame")
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
    for _ in range(MOST_SEGMENTS):
        head = read_at(offset, 8)
        if len(head) < 8:
            return 1
        kind, length = struct.unpack("<4sI", head)
        if kind == b"EXIF":
            return orientation_in(read_at(offset + 8, min(length, 1 << 16)).removeprefix(b"Exif\0\0"))
        offset += 8 + length + (length & 1)
    return 1


def _tiff(read_at: ReadAt) -> Header:
    tags = TiffTags(read_at)
    width, height = tags.first("width"), tags.first("height")
    if width is None or height is None:
        raise DecodeError("a TIFF without a size")
    return Header(
        "dng" if tags.first("dng_version") is not None else "tiff",
        width,
        height,
        tags.orientation,
        tags.first("bits") or 1,
        min(tags.first("samples") or 1, MOST_ENTRIES),
        2 if tags.next_page else 1,
    )


def _gif(read_at: ReadAt) -> Header:
    return Header("gif", *struct.unpack("<HH", read_at(6, 4)))


_READERS: dict[str, Callable[[ReadAt], Header]] = {
    "jpeg": _jpeg,
    "png": _png,
    "bmp": _bmp,
    "webp": _webp,
    "tiff": _tiff,
    "gif": _gif,
}
