"""A file's bytes to the array that was stored in it, with its planes in the order target, ref1, ref2.

TIFF keeps the stored order. PNG and JPEG are taken in the order blue, green, red, because that is how the pictures of
this kind have always been written and read: blue is target. Which decoder reads a TIFF follows from the file alone,
not from what is installed, so that its values are always the same.
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.feed import DecodeError
from flatout.images import READABLE, Header, check_promise, described, for_opencv, header_of

if TYPE_CHECKING:
    import tifffile


# TIFF pages made plain: what tifffile reads only with an extra package becomes an uncompressed page of whole bytes.
#
# So the values are those that are stored, whichever packages are installed. OpenCV unpacks the bytes (of LZW, and of
# others for packed integers and floats), but of a page whose rows of bytes it takes for rows of grey pixels: left to
# itself it scales 12 bits to 16, inverts MINISWHITE, obeys an orientation, and takes planes one after another for
# colours.

_UNCOMPRESSED, _LZW = 1, 5
_UNPACKED = (_UNCOMPRESSED, _LZW, 8, 32946, 32773)
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
    if page.compression == _UNCOMPRESSED:
        return np.frombuffer(data, np.uint8, num_rows * row_bytes).reshape(num_rows, row_bytes)
    kind = int(page.compression), int(page.fillorder)
    if num_rows * row_bytes % 2 == 0:
        # A row of an odd number of bytes and the next are one of words.
        by = 1 if row_bytes % 2 == 0 else 2
        found = _strip_by_opencv(data, kind, num_rows // by, row_bytes * by // 2, 16)
    else:
        # Of words OpenCV wants all, of bytes it takes what there is: the words that there are tell whether that is all.
        height, width = (num_rows // 2, row_bytes) if num_rows > 1 else (1, row_bytes // 2)
        is_whole = width == 0 or _strip_by_opencv(data, kind, height, width, 16) is not None
        found = _strip_by_opencv(data, kind, num_rows, row_bytes, 8) if is_whole else None
    if found is None:
        raise ValueError(f"part {segment + 1} of its data cannot be uncompressed ({compression_name(page)})")
    return found.reshape(-1).view(np.uint8).reshape(num_rows, row_bytes)


def _strip_by_opencv(data: bytes, kind: tuple[int, int], height: int, width: int, bits: int) -> np.ndarray | None:
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
        259: [_UNCOMPRESSED],
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
        raise DecodeError(f"it has {len(parts)} pages. RunRequest are three, target, ref1 and ref2, or four.")
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
