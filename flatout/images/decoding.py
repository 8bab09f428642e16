"""Image file -> pixels as `cv2.imread` returns them, and capture of what decoders print.

8-bit grey and RGB JPEGs are decoded by simplejpeg: the same library and the same pixels as OpenCV's, in less time
(bench/scan.py), but it ignores the orientation and trusts the header, so both are handled here. Files that it rejects,
for example because of stray bytes between the segments of a header, go to OpenCV; only files that neither can decode
are rejected.

Dimension key:  H height   W width
"""

import io
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

# Files

WINDOW_BYTES = 4096
"""Size of the first read: enough for the header of most files, and one page of the disk cache."""
MAX_BYTES = 1 << 30
"""Maximum size of an image file."""


class ImageFacts(NamedTuple):
    """What is known about an image file without decoding it."""

    header: Header
    ending: str
    """"whole", "absent" (no end marker where there should be one) or "more" (bytes after the end)."""
    num_bytes: int
    """Size of the file in bytes."""


def read_facts(path: str, *, verify: bool = False) -> ImageFacts:
    """Read the header and the end of an image file; `verify` reads all of a PNG and compares its checksums.

    Raises OSError for a file that cannot be opened, DecodeError for one that is not an image.
    """
    with open_regular(path) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        if size == 0:
            raise DecodeError("an empty file")
        header = read_header(_Window(fd), size)
        if verify and header.format == "png":
            check_png(lambda offset, count: os.pread(fd, count, offset), size)
        return ImageFacts(header, _ending(fd, size, header.format), size)


def read_bytes(path: str) -> bytes:
    """All bytes of an image file; raises DecodeError if there are more than MAX_BYTES."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
            raise DecodeError(f"a file of {size >> 20} MiB; at most {MAX_BYTES >> 20} MiB are read")
        return file.read()


def open_regular(path: str) -> io.FileIO:
    """Open a regular file for reading; raises OSError for a FIFO or device, on which reading could wait forever."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in the name
        raise OSError(f"not a valid file name: {error}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return io.FileIO(fd)


class _Window:
    """Reads parts of a file, from a buffer of its first page where possible."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = os.pread(fd, WINDOW_BYTES, 0)

    def __call__(self, offset: int, count: int) -> bytes:
        if count <= 0:
            return b""
        if offset + count <= len(self._start):
            return self._start[offset : offset + count]
        # Offsets come from the file and may be anything; pread only accepts 63 bits.
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
    """Raise DecodeError unless every chunk up to IEND is complete and has the right checksum."""
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


# Decoding

MAX_PIXELS = 100_000_000
"""10,000 x 10,000; decoding that takes 300 MB. OpenCV's own limit is ten times as many."""
MAX_PIXELS_PER_BYTE = 16_384
"""Maximum pixels per byte of a file. Some formats store any number of equal pixels in a few bytes; photos do not."""
HARMLESS_PIXELS = 6_000_000
"""Images up to this size are decoded however small the file is: they take less than 50 MB, decoder included."""
MAX_MISSING = 0.01
"""Maximum share of rows that may be missing at the end of a JPEG; if more are missing, the image is not used."""
GREY = 128
"""Value of pixels for which libjpeg has no data."""

_END = b"\xff\xd9"
_ANIMATION = (b"acTL", b"fcTL", b"fdAT")


class DecodedImage(NamedTuple):
    """A decoded image, with its header and defects."""

    image: np.ndarray
    """uint8 [H, W, 3], BGR."""
    header: Header
    missing: float
    """Share of the rows that the file does not contain: 0 except for a truncated JPEG."""
    complaint: str = ""
    """The error of a strict decoder, "" if none: some pixels may differ from those that were saved."""


def read_image(path: str) -> np.ndarray:
    """The pixels of a file, uint8 [H, W, 3], BGR; raises OSError or DecodeError if it is not usable."""
    return read_usable(path).image


def read_usable(path: str, *, at_least_px: int = 0, max_pixels: int | None = None) -> DecodedImage:
    """Like `read_image`, but also returns the header; for `at_least_px` and `max_pixels` see `decode`."""
    return decode_usable(read_bytes(path), at_least_px=at_least_px, max_pixels=max_pixels)


def decode_usable(content: bytes, *, at_least_px: int = 0, max_pixels: int | None = None) -> DecodedImage:
    """Like `decode`, but DecodeError if too many rows are missing."""
    decoded = decode(content, at_least_px=at_least_px, max_pixels=max_pixels)
    if decoded.missing > MAX_MISSING:
        raise DecodeError(f"cut off: {decoded.missing:.0%} of its rows are missing")
    return decoded


def decode(content: bytes, *, at_least_px: int = 0, max_pixels: int | None = None) -> DecodedImage:
    """Decode the bytes of an image file, even a truncated JPEG; of at most `max_pixels`, by default MAX_PIXELS.

    `at_least_px` allows decoding an upright JPEG at half, a quarter or an eighth of its size, as long as its long side
    is not smaller than that: faster, but not the same pixels (bench/augment_shrunk.py). The header still has the
    original size.
    """
    if not content:
        raise DecodeError("an empty file")
    header = header_of(content)
    check_size(header, len(content), max_pixels=max_pixels)
    if header.format in ("jpeg", "mpo") and header.bits == 8 and header.channels in (1, 3):
        return _decode_jpeg(content, header, at_least_px)
    image = _by_opencv(for_opencv(content, header))
    if image is None:
        kind = header.format.upper() + (f" of {header.bits} bits" if header.bits != 8 else "")
        raise DecodeError(f"OpenCV cannot decode this {kind}: it is damaged or of an unsupported kind")
    return DecodedImage(image, header, 0.0)


def for_opencv(content: bytes, header: Header) -> bytes:
    """The bytes to pass to OpenCV's decoder: an animated PNG is reduced to its default image, the rest is unchanged.

    When decoding from memory, OpenCV 4.14 returns the first frame if the default image is not part of the animation,
    while `imread` and Pillow return the default image; and with some grey frames it writes out of bounds.
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


def check_size(header: Header, num_bytes: int, *, max_pixels: int | None = None) -> None:
    """Raise DecodeError for an unsupported or oversized image, before a decoder allocates memory for it."""
    if header.format not in READABLE:
        raise DecodeError(f"not a usable image: {describe_format(header.format)}")
    limit = max_pixels or most_pixels(header.bits)
    if header.width * header.height > limit:
        advice = "Cut it into smaller images first" if max_pixels else "Use --tiles, or cut it into tiles first"
        raise DecodeError(f"{header.width} x {header.height} pixels; at most {limit:,} are decoded. {advice}")
    check_declared_size(header, num_bytes)


def check_declared_size(header: Header, num_bytes: int) -> None:
    """Raise DecodeError if the header declares more pixels than a file of `num_bytes` can hold."""
    if num_bytes < header.least_bytes:
        raise DecodeError(f"its header says {header.width} x {header.height}, which {num_bytes} bytes cannot hold")
    if header.width * header.height > max(num_bytes * MAX_PIXELS_PER_BYTE, HARMLESS_PIXELS):
        raise DecodeError(
            f"{header.width} x {header.height} pixels in {num_bytes} bytes, more than {MAX_PIXELS_PER_BYTE:,} pixels "
            "per byte: it is blank, or made to exhaust memory"
        )


def most_pixels(bits: int) -> int:
    """Maximum number of pixels to decode; OpenCV takes several times the memory for more than 8 bits per channel."""
    return MAX_PIXELS if bits <= 8 else MAX_PIXELS // 4


def describe_format(kind: str) -> str:
    """A format of `sniff` as text, for messages."""
    return "its format is unknown" if kind == "unknown" else f"its content is {kind.upper()}"


def turn_upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Apply EXIF's orientation; the result is contiguous, and the same array if there is nothing to do."""
    return image if orientation == 1 else np.ascontiguousarray(upright_view(image, orientation))


def upright_view(image: np.ndarray, orientation: int) -> np.ndarray:
    """The same pixels in the same memory, seen with EXIF's orientation applied."""
    if orientation >= 5:
        image = image.transpose(1, 0, 2)
    # After the transposition, 5 is done, 6 needs the columns reversed, 8 the rows, 7 both.
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return image[::rows, ::columns]


def missing_rows(image: np.ndarray) -> float:
    """Share of rows at the end whose last pixel is grey, as libjpeg leaves rows without data."""
    grey_H = (image[:, -1] == GREY).all(1)
    present = np.flatnonzero(~grey_H)
    return 1.0 if not len(present) else 1 - (present[-1] + 1) / len(image)


def _decode_jpeg(content: bytes, header: Header, at_least_px: int) -> DecodedImage:
    try:
        import simplejpeg
    except ImportError:
        return _decode_jpeg_by_opencv(content, header)
    least = _least_size(header, at_least_px)
    try:
        return _upright(simplejpeg.decode_jpeg(content, "BGR", **least), header, b"")
    except ValueError as error:
        complaint = " ".join(str(error).split())
    # Damaged: decode as much as cv2.imread does.
    try:
        image = simplejpeg.decode_jpeg(content, "BGR", strict=False, **least)
    except ValueError:
        return _decode_jpeg_by_opencv(content, header, complaint)
    return _upright(image, header, content, complaint)


def _decode_jpeg_by_opencv(content: bytes, header: Header, complaint: str = "") -> DecodedImage:
    image = _by_opencv(content, is_upright=False)
    if image is not None:
        return _upright(image, header, content if complaint else b"", complaint)
    # Without the end marker imdecode returns nothing, while imread returns what is there.
    image = _by_opencv(content + _END, is_upright=False)
    if image is None:
        # simplejpeg mentions the subsampling whenever it cannot parse a header.
        why = "its header is invalid" if "subsampling" in complaint else complaint or "OpenCV cannot decode it"
        raise DecodeError(f"a damaged JPEG: {why}")
    return _upright(image, header, content, complaint or "Premature end of JPEG file")


def _upright(image: np.ndarray, header: Header, content: bytes, complaint: str = "") -> DecodedImage:
    """The upright image of pixels as stored; `content` is given only if the file may be truncated."""
    missing = missing_rows(image) if content and _END not in content[-4096:] else 0.0
    return DecodedImage(turn_upright(image, header.orientation), header, missing, complaint)


def _by_opencv(content: bytes, *, is_upright: bool = True) -> np.ndarray | None:
    import cv2

    flags = cv2.IMREAD_COLOR | (0 if is_upright else cv2.IMREAD_IGNORE_ORIENTATION)
    try:
        image: np.ndarray | None = cv2.imdecode(np.frombuffer(content, np.uint8), flags)
    except cv2.error as error:
        raise DecodeError(f"OpenCV rejects it: {str(error).splitlines()[0][:120]}") from None
    return image


def _least_size(header: Header, at_least_px: int) -> dict[str, int]:
    """simplejpeg's arguments for decoding at a half, a quarter or an eighth, for which libjpeg has fast code."""
    if header.orientation != 1:
        return {}  # rotated, it would begin with the pixel that extends beyond the image (see `resize_scaled_decode`)
    longer = max(header.width, header.height)
    parts = next((parts for parts in (8, 4, 2) if 0 < at_least_px <= longer / parts), 1)
    if parts == 1:
        return {}
    return {"min_width": -(-header.width // parts), "min_height": -(-header.height // parts)}


# Messages of decoders: libjpeg, libpng, libtiff and OpenCV print to file descriptor 2

MAX_PRINTED_BYTES = 1 << 16
"""Maximum number of printed bytes that are kept."""

_OPENCV_PREFIX = re.compile(r"^\[ *[A-Z]+:\d+@[\d.]+\] (?:global )?(?:\S+:\d+ )?")


@contextmanager
def decoder_messages() -> Iterator[list[str]]:
    """Capture what decoders print while the block runs; the list contains the lines afterwards.

    Captures stderr of the whole process, so use it only for the few lines around a decoder, in a process with one
    thread.
    """
    lines: list[str] = []
    try:
        real = os.dup(2)
    except OSError:  # stderr is closed
        yield lines
        return
    kept = os.memfd_create("decoder messages", os.MFD_CLOEXEC)
    try:
        os.dup2(kept, 2)
        yield lines
    finally:
        os.dup2(real, 2)
        os.close(real)
        text = os.pread(kept, MAX_PRINTED_BYTES, 0).decode(errors="replace")
        os.close(kept)
        # A progress bar that another thread updates at the same time is not a message.
        lines += [_OPENCV_PREFIX.sub("", line).strip() for line in text.splitlines() if line.isprintable()]
        lines[:] = filter(None, lines)
