"""Decodes the bytes of a file to the stored array, with planes in the order target, ref1, ref2.

TIFF keeps the stored order. PNG and JPEG are read in the order blue, green, red, which is how such files have always
been written: blue is target. Which decoder reads a TIFF depends on the file alone and not on which packages are
installed, so that its values are always the same.

Dimension key:  R rows of a strip or tile   B bytes of a row   V values of a row   W pixels of a row
                S samples per pixel   b bits or bytes of a value
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.feed import DecodeError
from flatout.images import READABLE, Header, check_declared_size, describe_format, for_opencv, header_of

if TYPE_CHECKING:
    import tifffile

_TIFF_HEADS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_PAGES = 4
MAX_BYTES = 1 << 30
"""Maximum size of a file, and of the pixels that its header states: a hostile header can state anything."""
MAX_EXPANSION = 16_384
"""Maximum ratio of decoded size to file size; codecs reach it only for images of a single colour."""

_UNCOMPRESSED = 1
_BY_TIFFFILE = (_UNCOMPRESSED, 8, 32946, 34925, 32773)
"""Compressions that tifffile decodes without an extra package: none, deflate, LZMA, PackBits."""
_JPEG = (6, 7)
_TOGETHER = 1
"""Planar configuration: the values of a pixel are stored together."""
_AS_STORED = (1, 2, 6)
"""Photometric interpretations that OpenCV does not change: grey, RGB, YCbCr."""


def read_stored(path: str | Path, *, grey_is_plane: bool = False) -> np.ndarray:
    """Read the array stored in a file; OSError if it cannot be read, DecodeError if its content is invalid."""
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if not content:
        raise DecodeError("it is empty.")
    if len(content) > MAX_BYTES:
        raise DecodeError(f"it is larger than {MAX_BYTES >> 20} MiB.")
    return decode(content, grey_is_plane=grey_is_plane)


def decode(content: bytes, *, grey_is_plane: bool = False) -> np.ndarray:
    """As `read_stored`, from the bytes of a file; the first four decide whether it is a TIFF.

    `grey_is_plane`: a grey PNG or JPEG becomes [H, W] instead of three equal planes.
    """
    return _decode_tiff(content) if content[:4] in _TIFF_HEADS else _decode_png_or_jpeg(content, grey_is_plane)


def _decode_png_or_jpeg(content: bytes, grey_is_plane: bool) -> np.ndarray:
    """[H, W, 3] in the order B, G, R; grey becomes three equal planes, or [H, W]; alpha is dropped."""
    import cv2

    header = _checked_header(content)
    try:
        colours = cv2.IMREAD_ANYCOLOR if grey_is_plane else cv2.IMREAD_COLOR
        image = cv2.imdecode(np.frombuffer(for_opencv(content, header), np.uint8), colours | cv2.IMREAD_ANYDEPTH)
    except cv2.error as error:
        raise DecodeError(f"it cannot be decoded: {error.err}.") from None
    if image is None:
        raise DecodeError(
            f"the {header.format.upper()} file is damaged, or of a variant that OpenCV does not read. Copy it again, "
            "or save it as TIFF."
        )
    return np.asarray(image)


def _checked_header(content: bytes) -> Header:
    """Header of a PNG or JPEG file whose stated size fits into memory; DecodeError otherwise."""
    try:
        header = header_of(content)
        check_declared_size(header, len(content))
    except DecodeError as error:
        raise DecodeError(f"it cannot be decoded: {error}.") from None
    if header.format not in READABLE:
        raise DecodeError(f"it is not a TIFF, PNG, JPEG or BMP file: {describe_format(header.format)}.")
    _refuse_too_large(header.width * header.height * 3 * (1 if header.bits <= 8 else 2))
    return header


def _refuse_too_large(nbytes: int) -> None:
    if nbytes > MAX_BYTES:
        raise DecodeError(
            f"its header states {nbytes >> 20} MiB of pixels, more than the {MAX_BYTES >> 20} MiB allowed."
        )


def _decode_tiff(content: bytes) -> np.ndarray:
    """The stored array; of a file with several pages, the planes are the first axis."""
    import io

    import tifffile

    try:
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            stored = _stored_in(file, content)
    except DecodeError:
        raise
    except (LookupError, ArithmeticError, TypeError) as error:  # tifffile trusted invalid values in the file
        raise DecodeError(f"it is a truncated or damaged TIFF ({type(error).__name__} in tifffile).") from None
    except Exception as error:  # broad, because tifffile may raise anything for invalid bytes
        raise DecodeError(f"it cannot be decoded as TIFF: {' '.join(str(error).split())[:200]}.") from None
    if not stored.size:
        raise DecodeError("it is a TIFF without pixels.")
    return stored


def _stored_in(file: "tifffile.TiffFile", content: bytes) -> np.ndarray:
    series = file.series[0]
    parts = [series] if len(series.shape) != 2 else list(file.pages)
    if len(parts) > MAX_PAGES:
        raise DecodeError(f"it has {len(parts)} pages. Expected are three, target, ref1 and ref2, or four.")
    nbytes = sum(part.nbytes for part in parts)
    _refuse_too_large(nbytes)
    if len({part.shape for part in parts}) > 1:
        sizes = ", ".join(" x ".join(map(str, part.shape)) for part in parts)
        raise DecodeError(f"its pages have different sizes: {sizes}.")
    pages = [page.aspage() for page in (series.pages if parts == [series] else file.pages) if page is not None]
    _check_data(pages, nbytes, len(content))
    if any(page.compression in _JPEG for page in pages):
        return _by_opencv(pages, content)
    if any(_needs_unpacking(page) for page in pages):
        arrays = [_unpacked(content, page) if _needs_unpacking(page) else page.asarray() for page in pages]
        return np.stack(arrays).reshape(series.shape) if parts == [series] else _stacked(arrays)
    try:
        return _stacked([part.asarray() for part in parts])
    except (ImportError, ValueError) as error:
        if pages[0].compression in _BY_TIFFFILE:
            raise
        raise DecodeError(
            f"its compression {compression_name(pages[0])} needs the package imagecodecs "
            f"({' '.join(str(error).split())[:100]}): pip install imagecodecs, or save it uncompressed, or with "
            "deflate or LZW."
        ) from None


def _check_data(pages: "list[tifffile.TiffPage]", nbytes: int, num_bytes: int) -> None:
    """DecodeError unless all data lies within the file and is long enough: tifffile fills missing data with zeros."""
    is_plain = True
    for page in pages:
        if not page.dataoffsets or len(page.dataoffsets) != len(page.databytecounts):
            raise DecodeError("it does not state where its pixels are.")
        for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
            if count <= 0 or offset + count > num_bytes:
                raise DecodeError(
                    f"it is truncated or damaged: {count} bytes of pixels at offset {offset} are not in the file."
                )
        is_plain &= page.compression == _UNCOMPRESSED and page.bitspersample in (8, 16, 32, 64)
    if nbytes > num_bytes * (1 if is_plain else MAX_EXPANSION):
        raise DecodeError(f"it states {nbytes} bytes of pixels, which do not fit into a file of {num_bytes} bytes.")


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    return np.stack(arrays) if len(arrays) > 1 else np.asarray(arrays[0])


def _by_opencv(pages: "list[tifffile.TiffPage]", content: bytes) -> np.ndarray:
    """Decode JPEG inside TIFF (8 bits, grey or interleaved colours), always by OpenCV, whatever else is installed."""
    import cv2

    found, images = cv2.imdecodemulti(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    arrays = [_stored_order(np.asarray(image)) for image in images] if found else []
    is_usual = all(
        page.tags.valueof(274, 1) == 1
        and page.photometric in _AS_STORED
        and (page.samplesperpixel == 1 or page.planarconfig == _TOGETHER)
        for page in pages
    )
    # OpenCV may return invented pixels for what it cannot read.
    if not is_usual or not _fit(arrays, pages[0], len(pages)):
        raise DecodeError(
            "it holds JPEG data of a kind that is not supported. Save it uncompressed, or with deflate or LZW."
        )
    return _stacked(arrays)


def _stored_order(page: np.ndarray) -> np.ndarray:
    """Undo OpenCV's reversed channel order, which would swap target and ref2."""
    if page.ndim != 3 or page.shape[2] < 3:
        return page
    page = page.copy()
    page[:, :, :3] = page[:, :, 2::-1]
    return page


def _fit(found: list[np.ndarray], first: "tifffile.TiffPage", num_pages: int) -> bool:
    """Whether the decoded planes have the number, size and type that the file states."""
    kind = (first.imagelength, first.imagewidth), first.dtype
    planes = sum(page.shape[2] if page.ndim == 3 else 1 for page in found)
    is_alike = all((page.shape[:2], page.dtype) == kind for page in found)
    return is_alike and planes == first.samplesperpixel * num_pages


# Unpacked TIFF pages: what tifffile reads only with an extra package is put together here.
#
# The values are then the stored ones, whichever packages are installed. OpenCV decompresses the bytes (LZW, and other
# codecs of packed integers and floats) from a synthetic grey page whose pixels are the bytes of a row. Given the real
# page, it would scale 12 bits to 16, invert MINISWHITE, apply an orientation, and take separate planes for colours.

_LZW = 5
_UNPACKED = (_UNCOMPRESSED, _LZW, 8, 32946, 32773)
"""Compressions that can be unpacked here: also deflate and PackBits. OpenCV decodes others as black images."""
_GREY = 1
_LONG = 4
_UNSIGNED = 1
_DIFFERENCES, _FLOAT_DIFFERENCES = 2, 3
_WHOLE_BYTES = (8, 16, 32, 64)
"""Bits per value that fill bytes."""


def _needs_unpacking(page: "tifffile.TiffPage") -> bool:
    """Whether tifffile alone cannot read a page, but `_unpacked` can."""
    if page.compression not in _UNPACKED:
        return False
    is_packed = page.bitspersample not in (1, *_WHOLE_BYTES) and page.sampleformat == _UNSIGNED
    return page.compression == _LZW or page.predictor == _FLOAT_DIFFERENCES or is_packed


def _unpacked(content: bytes, page: "tifffile.TiffPage") -> np.ndarray:
    """The values of a page in the shape that tifffile gives it; ValueError if they cannot be read."""
    planes, _, height, width, samples = page.shaped
    rows, columns = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, width)
    values, bits, dtype = columns * samples, page.bitspersample, page.dtype
    if dtype is None:
        raise ValueError(f"values of {bits} bits in sample format {page.sampleformat}")
    down, across = -(-height // rows), -(-width // columns)
    row_bytes = -(-values * bits // 8)
    segments = [
        # The last strip of a plane may be shorter, tiles are always complete.
        _uncompressed(content, page, at, rows if page.is_tiled else min(rows, height - at % down * rows), row_bytes)
        for at in range(planes * down * across)
    ]
    if bits not in _WHOLE_BYTES:
        if page.predictor != 1:
            raise ValueError(f"{bits} bits per value with a predictor")
        segments = [_widened(row_RB, values, bits, dtype) for row_RB in segments]
    else:
        restored = {1: _viewed, _DIFFERENCES: _summed, _FLOAT_DIFFERENCES: _summed_floats}[page.predictor]
        segments = [restored(row_RB, samples, dtype.newbyteorder(page.parent.byteorder)) for row_RB in segments]
    if page.is_tiled:
        tiles = np.stack(segments).reshape(planes, down, across, rows, columns, samples).swapaxes(2, 3)
        whole = tiles.reshape(planes, down * rows, across * columns, samples)[:, :height, :width]
    else:
        whole = np.concatenate(segments)
    return whole.reshape(page.shape).astype(dtype, copy=False)


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
        # Decoded as 16-bit pixels; two rows of an odd number of bytes make one row.
        by = 1 if row_bytes % 2 == 0 else 2
        found = _strip_by_opencv(data, kind, num_rows // by, row_bytes * by // 2, 16)
    else:
        # OpenCV accepts truncated data for 8-bit pixels but not for 16-bit ones: a 16-bit decode detects truncation.
        height, width = (num_rows // 2, row_bytes) if num_rows > 1 else (1, row_bytes // 2)
        is_whole = width == 0 or _strip_by_opencv(data, kind, height, width, 16) is not None
        found = _strip_by_opencv(data, kind, num_rows, row_bytes, 8) if is_whole else None
    if found is None:
        raise ValueError(f"part {segment + 1} of its data cannot be uncompressed ({compression_name(page)})")
    return found.reshape(-1).view(np.uint8).reshape(num_rows, row_bytes)


def _strip_by_opencv(data: bytes, kind: tuple[int, int], height: int, width: int, bits: int) -> np.ndarray | None:
    """Compressed data decoded as a grey image, uint8 or uint16 [height, width]; None if that fails."""
    import cv2

    compression, fillorder = kind
    numbers = {
        256: width,
        257: height,
        258: bits,
        259: compression,
        262: _GREY,
        266: fillorder,
        273: 0,
        277: 1,
        278: height,
        279: len(data),
    }
    numbers[273] = 8 + 2 + 12 * len(numbers) + 4  # the data follows the header
    entries = b"".join(struct.pack("<HHII", tag, _LONG, 1, number) for tag, number in numbers.items())
    header = b"II" + struct.pack("<HIH", 42, 8, len(numbers)) + entries + bytes(4)
    found = cv2.imdecode(np.frombuffer(header + data, np.uint8), cv2.IMREAD_UNCHANGED)
    is_whole = found is not None and found.shape == (height, width) and found.dtype.itemsize * 8 == bits
    return np.ascontiguousarray(found) if is_whole else None


def _widened(row_RB: np.ndarray, values: int, bits: int, dtype: np.dtype) -> np.ndarray:
    """Widen packed integers to whole bytes; every row begins at a byte boundary."""
    bit_RVb = np.unpackbits(row_RB, axis=1, count=values * bits).reshape(len(row_RB), values, bits)
    padded_RVb = np.pad(bit_RVb, ((0, 0), (0, 0), (8 * dtype.itemsize - bits, 0)))
    return np.packbits(padded_RVb, axis=-1).view(f">u{dtype.itemsize}")


def _viewed(row_RB: np.ndarray, samples: int, dtype: np.dtype) -> np.ndarray:
    """The values as they are, [R, W, S]."""
    return row_RB.view(dtype).reshape(len(row_RB), -1, samples)


def _summed(row_RB: np.ndarray, samples: int, dtype: np.dtype) -> np.ndarray:
    """Undo the predictor that stores differences from the pixel to the left."""
    return np.cumsum(_viewed(row_RB, samples, dtype), axis=1, dtype=dtype.newbyteorder("="))


def _summed_floats(row_RB: np.ndarray, samples: int, dtype: np.dtype) -> np.ndarray:
    """Undo the floating-point predictor: byte differences, highest bytes of a row first (Adobe's technical note 3)."""
    byte_RB = np.cumsum(row_RB.reshape(len(row_RB), -1, samples), axis=1, dtype=np.uint8)
    byte_RbV = byte_RB.reshape(len(row_RB), dtype.itemsize, -1)
    return np.ascontiguousarray(byte_RbV.transpose(0, 2, 1)).view(dtype.newbyteorder(">"))
