"""Bytes of a picture file -> pixels as `cv2.imread` gives them: uint8 [H, W, 3], BGR, orientation obeyed.

JPEG goes through simplejpeg where its header says that nothing can go wrong: the same library and the same pixels as
OpenCV's, in less time (bench/scan.py), but it knows no orientation and believes headers that lie.
"""

from typing import Any, NamedTuple

import numpy as np

from flatout.feed import DecodeError
from flatout.images.file import read_bytes
from flatout.images.header import READABLE, Header, header_of

MOST_PIXELS = 100_000_000
"""10,000 x 10,000; decoding that takes 300 MB. OpenCV itself stops at ten times as many."""
MOST_PIXELS_PER_BYTE = 4_000
"""A JPEG block of 8 x 8 takes at least a bit, and most of a picture is more than one colour: beyond, a header lies."""
MOST_MISSING = 0.01
"""Share of rows that may be missing at the end of a JPEG; more, and the picture is not used."""
GREY = 128
"""What libjpeg puts where data is missing."""


class Picture(NamedTuple):
    """A decoded picture and how it came to be."""

    image: np.ndarray
    """uint8 [H, W, 3], BGR."""
    header: Header
    missing: float
    """Share of the rows that the file does not hold: 0 but for a JPEG that was cut off."""


def read_picture(path: str) -> np.ndarray:
    """The pixels of a file; OSError or DecodeError where there are none that can be used."""
    return read_usable(path).image


def read_usable(path: str, *, at_least_px: int = 0) -> Picture:
    """As `read_picture`, with the header; `at_least_px` as for `decode`."""
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
    import cv2

    image = _by_opencv(content, cv2)
    if image is None:
        raise DecodeError(f"OpenCV cannot decode this {header.format.upper()}: it is damaged or of a rare kind")
    return Picture(image, header, 0.0)


def check_size(header: Header, num_bytes: int) -> None:
    """Refuse what is no picture for training before a decoder makes room for it."""
    if header.format not in READABLE:
        raise DecodeError(f"not a picture that can be used: {described(header.format)}")
    if header.width * header.height > most_pixels(header):
        raise DecodeError(
            f"{header.width} x {header.height} pixels; {most_pixels(header):,} is the most. Cut it into tiles first"
        )
    if header.format in ("jpeg", "mpo") and header.width * header.height > num_bytes * MOST_PIXELS_PER_BYTE:
        raise DecodeError(f"its header says {header.width} x {header.height}, which {num_bytes} bytes cannot hold")


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
    missing = 0.0
    try:
        image = simplejpeg.decode_jpeg(content, "BGR", **least)
    except ValueError:
        # Damaged. What can be saved is what cv2.imread gives.
        try:
            image = simplejpeg.decode_jpeg(content, "BGR", strict=False, **least)
        except ValueError as error:
            raise DecodeError(f"a damaged JPEG: {error}") from None
        missing = missing_rows(image) if b"\xff\xd9" not in content[-4096:] else 0.0
    return Picture(turn_upright(image, header.orientation), header, missing)


def _decode_jpeg_by_opencv(content: bytes, header: Header) -> Picture:
    import cv2

    image = _by_opencv(content, cv2)
    if image is None:
        # imdecode gives nothing for a file without its end marker, where imread gives what is there.
        image = _by_opencv(content + b"\xff\xd9", cv2)
        if image is None:
            raise DecodeError("a damaged JPEG")
        return Picture(image, header, missing_rows(image) if header.orientation == 1 else 0.0)
    return Picture(image, header, 0.0)


def _by_opencv(content: bytes, cv2: Any) -> np.ndarray | None:
    try:
        image: np.ndarray | None = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
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
