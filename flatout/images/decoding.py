"""A picture file on disk -> pixels as `cv2.imread` gives them, and what decoders print meanwhile.

JPEG goes through simplejpeg where its header says that nothing can go wrong: the same library and the same pixels as
OpenCV's, in less time (bench/scan.py), but it knows no orientation and believes headers that lie. What it refuses,
such as stray bytes between the segments of a header, goes to OpenCV; only what neither decodes is refused.
"""

import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from flatout.feed import DecodeError
from flatout.images.header import READABLE, Header, ReadAt, header_of, read_header

# A picture file on disk: opened without traps, its header read, its end looked at.

WINDOW_BYTES = 4096
"""Read at once: enough for the header of most files, and one page of the disk cache."""
MOST_BYTES = 1 << 30
"""Of one picture file."""


class Facts(NamedTuple):
    """What can be known about a picture without decoding it."""

    header: Header
    ending: str
    """"whole", "absent" (no end marker where there should be one) or "more" (bytes after the end)."""
    num_bytes: int
    """Size of the file in bytes."""


def read_facts(path: str, *, verify: bool = False) -> Facts:
    """Header and end of a picture; `verify` reads all of a PNG and compares its checksums.

    Raises OSError for a file that cannot be opened, DecodeError for one that is no picture.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise DecodeError("an empty file")
        header = read_header(_Window(fd), size)
        if verify and header.format == "png":
            check_png(lambda offset, count: os.pread(fd, count, offset), size)
        return Facts(header, _ending(fd, size, header.format), size)
    finally:
        os.close(fd)


def read_bytes(path: str) -> bytes:
    """All of a picture file."""
    fd = open_regular(path)
    with open(fd, "rb") as file:
        if (size := os.fstat(fd).st_size) > MOST_BYTES:
            raise DecodeError(f"a file of {size >> 20} MiB; {MOST_BYTES >> 20} MiB is the most that is read")
        return file.read()


def open_regular(path: str) -> int:
    """A descriptor of a regular file; a FIFO or device, on which reading could wait for ever, is an OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in the name
        raise OSError(f"not a possible file name: {error}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return fd


class _Window:
    """Reads of a file, answered from its first page where they lie in it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = os.pread(fd, WINDOW_BYTES, 0)

    def __call__(self, offset: int, count: int) -> bytes:
        if count <= 0:
            return b""
        if offset + count <= len(self._start):
            return self._start[offset : offset + count]
        # Offsets come from the file and may be anything; pread takes what fits into 63 bits.
        return os.pread(self._fd, count, offset) if offset < 1 << 62 else b""


def _ending(fd: int, size: int, kind: str) -> str:
    mark = {"jpeg": b"\xff\xd9", "png": b"IEND\xaeB`\x82"}.get(kind)
    if mark is None:
        return "whole"
    tail = os.pread(fd, WINDOW_BYTES, max(0, size - WINDOW_BYTES))
    if tail.endswith(mark):
        return "whole"
    return "more" if mark in tail else "absent"


def check_png(read_at: ReadAt, size: int) -> None:
    """DecodeError unless every chunk is whole and has the right checksum, as far as IEND."""
    offset = 8
    while offset < size:
        head = read_at(offset, 8)
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if len(head) < 8 or offset + 12 + length > size:
            raise DecodeError("a PNG that is cut off")
        content = read_at(offset + 8, length + 4)
        if zlib.crc32(kind + content[:length]) != int.from_bytes(content[length:], "big"):
            raise DecodeError(f"a PNG whose chunk {kind!r} has a wrong checksum")
        if kind == b"IEND":
            return
        offset += 12 + length
    raise DecodeError("a PNG that is cut off")


MOST_PIXELS = 100_000_000
"""10,000 x 10,000; decoding that takes 300 MB. OpenCV itself stops at ten times as many."""
MOST_PIXELS_PER_BYTE = 16_384
"""Most pixels per byte of a file. Some formats hold any number of equal pixels in a few bytes; no photograph does."""
HARMLESS_PIXELS = 6_000_000
"""Decoded however few bytes they are: below 50 MB, whatever the decoder needs in between."""
MOST_MISSING = 0.01
"""Share of rows that may be missing at the end of a JPEG; more, and the picture is not used."""
GREY = 128
"""What libjpeg puts where data is missing."""

_END = b"\xff\xd9"
_ANIMATION = (b"acTL", b"fcTL", b"fdAT")


class Picture(NamedTuple):
    """A decoded picture and how it came to be."""

    image: np.ndarray
    """uint8 [H, W, 3], BGR."""
    header: Header
    missing: float
    """Share of the rows that the file does not hold: 0 but for a JPEG that was cut off."""
    complaint: str = ""
    """What a strict decoder says against the file, "" if nothing: some pixels may not be those that were saved."""


def read_image(path: str) -> np.ndarray:
    """The pixels of a file; OSError or DecodeError where there are none that can be used."""
    return read_usable(path).image


def read_usable(path: str, *, at_least_px: int = 0) -> Picture:
    """As `read_image`, with the header; `at_least_px` as for `decode`."""
    picture = decode(read_bytes(path), at_least_px=at_least_px)
    if picture.missing > MOST_MISSING:
        raise DecodeError(f"cut off: {picture.missing:.0%} of its rows are missing")
    return picture


def decode(content: bytes, *, at_least_px: int = 0) -> Picture:
    """Pixels of the bytes of a picture file, also of a JPEG that was cut off.

    `at_least_px` allows a half, a quarter or an eighth of an upright JPEG, its long side not below it: faster, but not
    the same pixels (bench/augment_shrunk.py). The header still has the size of the file.
    """
    if not content:
        raise DecodeError("an empty file")
    header = header_of(content)
    check_size(header, len(content))
    if header.format in ("jpeg", "mpo") and header.bits == 8 and header.channels in (1, 3):
        return _decode_jpeg(content, header, at_least_px)
    image = _by_opencv(for_opencv(content, header))
    if image is None:
        kind = header.format.upper() + (f" of {header.bits} bits" if header.bits != 8 else "")
        raise DecodeError(f"OpenCV cannot decode this {kind}: it is damaged or of a rare kind")
    return Picture(image, header, 0.0)


def for_opencv(content: bytes, header: Header) -> bytes:
    """What to hand to OpenCV's decoder: an animated PNG as its default image alone, anything else as it is.

    From memory, OpenCV 4.14 gives the first frame where the default image is not part of the animation, while
    `imread` and Pillow give the default image; and with some grey frames it writes beyond its own memory.
    """
    if header.format != "png" or not any(kind in content for kind in _ANIMATION):
        return content
    kept, offset = [content[:8]], 8
    while offset < len(content):
        end = offset + 12 + int.from_bytes(content[offset : offset + 4], "big")
        if content[offset + 4 : offset + 8] not in _ANIMATION:
            kept.append(content[offset:end])
        offset = end
    return b"".join(kept)


def check_size(header: Header, num_bytes: int) -> None:
    """Refuse what is no picture for training before a decoder makes room for it."""
    if header.format not in READABLE:
        raise DecodeError(f"not a picture that can be used: {described(header.format)}")
    if header.width * header.height > most_pixels(header):
        raise DecodeError(
            f"{header.width} x {header.height} pixels; {most_pixels(header):,} is the most. Cut it into tiles first"
        )
    check_promise(header, num_bytes)


def check_promise(header: Header, num_bytes: int) -> None:
    """Refuse a header that promises more pixels than a file of so many bytes can hold."""
    if num_bytes < header.least_bytes:
        raise DecodeError(f"its header says {header.width} x {header.height}, which {num_bytes} bytes cannot hold")
    if header.width * header.height > max(num_bytes * MOST_PIXELS_PER_BYTE, HARMLESS_PIXELS):
        raise DecodeError(
            f"{header.width} x {header.height} pixels in {num_bytes} bytes; {MOST_PIXELS_PER_BYTE:,} pixels per byte "
            "are the most. It is blank, or made to fill the memory"
        )


def most_pixels(header: Header) -> int:
    """What is decoded at most; OpenCV takes several times the memory for more than 8 bits."""
    return MOST_PIXELS if header.bits <= 8 else MOST_PIXELS // 4


def described(kind: str) -> str:
    return "its content is of no known format" if kind == "unknown" else f"its content is {kind.upper()}"


def turn_upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Obey EXIF's orientation; contiguous, the same array where there is nothing to do."""
    if orientation == 1:
        return image
    if orientation >= 5:
        image = image.transpose(1, 0, 2)
    # After the transposition: 5 is done, 6 needs the columns turned round, 8 the rows, 7 both.
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(image[::rows, ::columns])


def missing_rows(image: np.ndarray) -> float:
    """Share of rows at the end that are grey at their right end, as libjpeg leaves what it did not find."""
    grey_H = (image[:, -1] == GREY).all(1)
    present = np.flatnonzero(~grey_H)
    return 1.0 if not len(present) else 1 - (present[-1] + 1) / len(image)


def _decode_jpeg(content: bytes, header: Header, at_least_px: int) -> Picture:
    try:
        import simplejpeg
    except ImportError:
        return _decode_jpeg_by_opencv(content, header)
    least = _least_size(header, at_least_px)
    try:
        return _upright(simplejpeg.decode_jpeg(content, "BGR", **least), header, b"")
    except ValueError as error:
        complaint = " ".join(str(error).split())
    # Damaged. What can be saved is what cv2.imread gives.
    try:
        image = simplejpeg.decode_jpeg(content, "BGR", strict=False, **least)
    except ValueError:
        return _decode_jpeg_by_opencv(content, header, complaint)
    return _upright(image, header, content, complaint)


def _decode_jpeg_by_opencv(content: bytes, header: Header, complaint: str = "") -> Picture:
    image = _by_opencv(content, is_upright=False)
    if image is not None:
        return _upright(image, header, content if complaint else b"", complaint)
    # imdecode gives nothing for a file without its end marker, where imread gives what is there.
    image = _by_opencv(content + _END, is_upright=False)
    if image is None:
        # simplejpeg says this of every header that it cannot make sense of.
        why = "its header makes no sense" if "subsampling" in complaint else complaint or "OpenCV cannot decode it"
        raise DecodeError(f"a damaged JPEG: {why}")
    return _upright(image, header, content, complaint or "Premature end of JPEG file")


def _upright(image: np.ndarray, header: Header, content: bytes, complaint: str = "") -> Picture:
    """The picture of pixels as stored; `content` of a file that may be cut off."""
    missing = missing_rows(image) if content and _END not in content[-4096:] else 0.0
    return Picture(turn_upright(image, header.orientation), header, missing, complaint)


def _by_opencv(content: bytes, *, is_upright: bool = True) -> np.ndarray | None:
    import cv2

    flags = cv2.IMREAD_COLOR | (0 if is_upright else cv2.IMREAD_IGNORE_ORIENTATION)
    try:
        image: np.ndarray | None = cv2.imdecode(np.frombuffer(content, np.uint8), flags)
    except cv2.error as error:
        raise DecodeError(f"OpenCV refuses it: {str(error).splitlines()[0][:120]}") from None
    return image


def _least_size(header: Header, at_least_px: int) -> dict[str, int]:
    """What simplejpeg shall shrink to: a half, a quarter or an eighth, which libjpeg has fast code for."""
    if header.orientation != 1:
        return {}  # turned, it would begin with the pixel that reaches beyond the picture (see `resize_part`)
    longer = max(header.width, header.height)
    parts = next((parts for parts in (8, 4, 2) if 0 < at_least_px <= longer / parts), 1)
    if parts == 1:
        return {}
    return {"min_width": -(-header.width // parts), "min_height": -(-header.height // parts)}


# What decoders print: libjpeg, libpng, libtiff and OpenCV write to file descriptor 2, whoever listens there.

MOST_PRINTED_BYTES = 1 << 16
"""Most bytes that are kept of what is printed."""

_OPENCV_PREFIX = re.compile(r"^\[ *[A-Z]+:\d+@[\d.]+\] (?:global )?(?:\S+:\d+ )?")


@contextmanager
def decoder_messages() -> Iterator[list[str]]:
    """Keep what decoders print off the terminal while the block runs; the list has its lines afterwards.

    The whole process is silent meanwhile, so this is for the few lines around a decoder, in a process of one thread.
    """
    lines: list[str] = []
    try:
        real = os.dup(2)
    except OSError:  # closed: nobody listens
        yield lines
        return
    kept = os.memfd_create("decoder messages", os.MFD_CLOEXEC)
    try:
        os.dup2(kept, 2)
        yield lines
    finally:
        os.dup2(real, 2)
        os.close(real)
        text = os.pread(kept, MOST_PRINTED_BYTES, 0).decode(errors="replace")
        os.close(kept)
        # A bar that another thread draws meanwhile is no message.
        lines += [_OPENCV_PREFIX.sub("", line).strip() for line in text.splitlines() if line.isprintable()]
        lines[:] = filter(None, lines)
