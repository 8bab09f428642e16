"""A file's bytes to the array that was stored in it, with its planes in the order target, ref1, ref2.

TIFF keeps the stored order. PNG and JPEG are taken in the order blue, green, red, because that is how the pictures of
this kind have always been written and read: blue is target. Which decoder reads a TIFF follows from the file alone,
not from what is installed, so that its values are always the same.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.defect.strips.tiff_plain import compression_name, needs_plain, plain
from flatout.feed.source import DecodeError
from flatout.images import READABLE, Header, check_promise, described, for_opencv, header_of

if TYPE_CHECKING:
    import tifffile

_TIFF_HEADS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MOST_PAGES = 4
MOST_BYTES = 1 << 30
"""Of a file, and of what it says it decodes to: a hostile header can promise anything."""
MOST_FACTOR = 16_384
"""Times the size of the file that compressed pixels may take; no codec reaches it but on a single colour."""

_NONE = 1
_BY_TIFFFILE = (_NONE, 8, 32946, 34925, 32773)
"""Compressions that tifffile knows by itself: none, deflate, LZMA, PackBits."""
_JPEG = (6, 7)
_TOGETHER = 1
"""Planar configuration: the values of a pixel one after another."""
_AS_STORED = (1, 2, 6)
"""Photometric interpretations that OpenCV does not change: grey, RGB, YCbCr."""


def read_stored(path: str | Path) -> np.ndarray:
    """The array in a file; OSError if it cannot be read, DecodeError if it makes no sense."""
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if not content:
        raise DecodeError("it is empty.")
    if len(content) > MOST_BYTES:
        raise DecodeError(f"it is larger than {MOST_BYTES >> 20} MiB.")
    return decode(content)


def decode(content: bytes) -> np.ndarray:
    """As `read_stored`, from bytes; the kind is told by the first of them."""
    return _decode_tiff(content) if content[:4] in _TIFF_HEADS else _decode_picture(content)


def _decode_picture(content: bytes) -> np.ndarray:
    """[H, W, 3] in the order B, G, R; grey becomes three equal planes, alpha is dropped."""
    import cv2

    header = _checked_header(content)
    try:
        picture = cv2.imdecode(
            np.frombuffer(for_opencv(content, header), np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH
        )
    except cv2.error as error:
        raise DecodeError(f"it cannot be decoded: {error.err}.") from None
    if picture is None:
        raise DecodeError(f"it is a damaged {header.format.upper()} file, or one of a rare kind.")
    return np.asarray(picture)


def _checked_header(content: bytes) -> Header:
    """Header of a picture that, as far as it says, fits into memory."""
    try:
        header = header_of(content)
        check_promise(header, len(content))
    except DecodeError as error:
        raise DecodeError(f"it cannot be decoded: {error}.") from None
    if header.format not in READABLE:
        raise DecodeError(f"it is no TIFF, PNG or JPEG file: {described(header.format)}.")
    nbytes = header.width * header.height * 3 * (1 if header.bits <= 8 else 2)
    if nbytes > MOST_BYTES:
        raise DecodeError(f"it says it holds {nbytes >> 20} MiB.")
    return header


def _decode_tiff(content: bytes) -> np.ndarray:
    """As stored; a file of several pages has its planes first."""
    import io

    import tifffile

    try:
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            stored = _stored_in(file, content)
    except DecodeError:
        raise
    except (LookupError, ArithmeticError, TypeError) as error:  # a parser that trusted the file
        raise DecodeError(f"it is a cut off or damaged TIFF ({type(error).__name__} in tifffile).") from None
    except Exception as error:  # whatever a parser may raise for bytes that anybody made
        raise DecodeError(f"it cannot be decoded as TIFF: {' '.join(str(error).split())[:200]}.") from None
    if not stored.size:
        raise DecodeError("it is a TIFF without pixels.")
    return stored


def _stored_in(file: "tifffile.TiffFile", content: bytes) -> np.ndarray:
    series = file.series[0]
    parts = [series] if len(series.shape) != 2 else list(file.pages)
    if len(parts) > MOST_PAGES:
        raise DecodeError(f"it has {len(parts)} pages. Wanted are three, target, ref1 and ref2, or four.")
    nbytes = sum(part.nbytes for part in parts)
    if nbytes > MOST_BYTES:
        raise DecodeError(f"it says it holds {nbytes >> 20} MiB.")
    if len({part.shape for part in parts}) > 1:
        sizes = ", ".join(" x ".join(map(str, part.shape)) for part in parts)
        raise DecodeError(f"its pages have different sizes: {sizes}.")
    pages = [page.aspage() for page in (series.pages if parts == [series] else file.pages) if page is not None]
    _check_data(pages, nbytes, len(content))
    if any(page.compression in _JPEG for page in pages):
        return _by_opencv(pages, content)
    if any(needs_plain(page) for page in pages):
        arrays = [_plain_array(page, content) for page in pages]
        return np.stack(arrays).reshape(series.shape) if parts == [series] else _stacked(arrays)
    try:
        return _stacked([part.asarray() for part in parts])
    except (ImportError, ValueError) as error:
        if pages[0].compression in _BY_TIFFFILE:
            raise
        raise DecodeError(
            f"its compression {compression_name(pages[0])} needs the package imagecodecs "
            f"({' '.join(str(error).split())[:100]}). Or save it uncompressed, or with deflate or LZW."
        ) from None


def _check_data(pages: "list[tifffile.TiffPage]", nbytes: int, num_bytes: int) -> None:
    """Every part of the data in the file, and enough of it: what is missing, tifffile would fill with zeros."""
    is_plain = True
    for page in pages:
        if not page.dataoffsets or len(page.dataoffsets) != len(page.databytecounts):
            raise DecodeError("it does not say where its pixels are.")
        for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
            if count <= 0 or offset + count > num_bytes:
                raise DecodeError(f"it is cut off or damaged: {count} bytes of pixels at {offset} are not in the file.")
        is_plain &= page.compression == _NONE and page.bitspersample in (8, 16, 32, 64)
    if nbytes > num_bytes * (1 if is_plain else MOST_FACTOR):
        raise DecodeError(f"it says it holds {nbytes} bytes of pixels, which {num_bytes} bytes of file cannot.")


def _plain_array(page: "tifffile.TiffPage", content: bytes) -> np.ndarray:
    import io

    import tifffile

    with tifffile.TiffFile(io.BytesIO(plain(content, page) if needs_plain(page) else content)) as file:
        return np.asarray((file.pages[0] if needs_plain(page) else file.pages[page.index]).asarray())


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    return np.stack(arrays) if len(arrays) > 1 else np.asarray(arrays[0])


def _by_opencv(pages: "list[tifffile.TiffPage]", content: bytes) -> np.ndarray:
    """JPEG inside TIFF, of 8 bits, grey or colours of a pixel together; OpenCV's pixels, whatever else is installed."""
    import cv2

    found, images = cv2.imdecodemulti(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    arrays = [_stored_order(np.asarray(image)) for image in images] if found else []
    is_usual = all(
        page.tags.valueof(274, 1) == 1
        and page.photometric in _AS_STORED
        and (page.samplesperpixel == 1 or page.planarconfig == _TOGETHER)
        for page in pages
    )
    # What OpenCV cannot read it may make up.
    if not is_usual or not _fit(arrays, pages[0], len(pages)):
        raise DecodeError(
            "it holds JPEG data of a kind that is not read. Save it uncompressed, or with deflate or LZW."
        )
    return _stacked(arrays)


def _stored_order(page: np.ndarray) -> np.ndarray:
    """OpenCV hands colours out reversed; without this, target and ref2 would change places."""
    if page.ndim != 3 or page.shape[2] < 3:
        return page
    page = page.copy()
    page[:, :, :3] = page[:, :, 2::-1]
    return page


def _fit(found: list[np.ndarray], first: "tifffile.TiffPage", num_pages: int) -> bool:
    """Whether there are as many planes as the file says, of its size and kind."""
    kind = (first.imagelength, first.imagewidth), first.dtype
    planes = sum(page.shape[2] if page.ndim == 3 else 1 for page in found)
    is_alike = all((page.shape[:2], page.dtype) == kind for page in found)
    return is_alike and planes == first.samplesperpixel * num_pages
