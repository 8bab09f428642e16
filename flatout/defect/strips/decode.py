"""A file's bytes to the array that was stored in it, with its planes in the order target, ref1, ref2.

TIFF keeps the stored order. PNG and JPEG are taken in the order blue, green, red, because that is how the pictures of
this kind have always been written and read: blue is target.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.defect.strips.tiff_parts import parts_of
from flatout.feed.source import DecodeError

if TYPE_CHECKING:
    import tifffile

_TIFF_HEADS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MOST_PAGES = 4
MOST_BYTES = 1 << 30
"""Of a file, and of what it says it decodes to: a hostile header can promise anything."""


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

    try:
        picture = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
    except cv2.error as error:
        raise DecodeError(f"it cannot be decoded: {error.err}.") from None
    if picture is None:
        raise DecodeError("it is no TIFF, PNG or JPEG file, or a damaged one.")
    return np.asarray(picture)


def _decode_tiff(content: bytes) -> np.ndarray:
    """As stored; a file of several pages has its planes first."""
    import io

    import tifffile

    try:
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            return _stored_in(file)
    except DecodeError:
        raise
    except Exception as error:  # whatever a parser may raise for bytes that anybody made
        array = _decode_tiff_with_opencv(content)
        if array is None:
            raise DecodeError(f"it cannot be decoded as TIFF: {' '.join(str(error).split())[:200]}") from None
        return array


def _stored_in(file: "tifffile.TiffFile") -> np.ndarray:
    series = file.series[0]
    pages = [series] if len(series.shape) != 2 else file.pages
    if len(pages) > MOST_PAGES:
        raise DecodeError(f"it has {len(pages)} pages. Wanted are three, target, ref1 and ref2, or four.")
    nbytes = sum(page.nbytes for page in pages)
    if nbytes > MOST_BYTES:
        raise DecodeError(f"it says it holds {nbytes >> 20} MiB.")
    if len({page.shape for page in pages}) > 1:
        sizes = ", ".join(" x ".join(map(str, page.shape)) for page in pages)
        raise DecodeError(f"its pages have different sizes: {sizes}.")
    arrays = [page.asarray() for page in pages]
    return np.stack(arrays) if len(arrays) > 1 else np.asarray(arrays[0])


def _decode_tiff_with_opencv(content: bytes) -> np.ndarray | None:
    """LZW and other codecs that tifffile needs an extra package for; None if OpenCV cannot either."""
    import io

    import tifffile

    try:
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            first, num_pages = file.pages.first, len(file.pages)
            parts = parts_of(content, first) if num_pages == 1 else []
            pages = [page for part in parts or [content] for page in _pages(part)]
            # What OpenCV cannot read it may make up.
            if not _fit(pages, first, num_pages):
                return None
    except Exception:  # as above; OpenCV has its own kinds
        return None
    return np.stack(pages) if len(pages) > 1 else pages[0]


def _pages(content: bytes) -> list[np.ndarray]:
    """What OpenCV finds in a file: [H, W] or [H, W, planes in stored order] each."""
    import cv2

    found, pages = cv2.imdecodemulti(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    return [_stored_order(np.asarray(page)) for page in pages] if found else []


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
