"""Files that a data set of strips may hold: valid ones of every kind, and invalid ones that must be refused."""

import io
import struct
from collections.abc import Iterator

import cv2
import numpy as np
import tifffile

SHAPE_HW = (40, 36)


def planes(kind: str = "uint8", num: int = 3, top: int = 200) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, top, (num, *SHAPE_HW)).astype(kind)


def tiff(array: np.ndarray, **layout) -> bytes:
    sink = io.BytesIO()
    layout.setdefault("photometric", "minisblack")
    tifffile.imwrite(sink, array, **layout)
    return sink.getvalue()


def pages(*arrays: np.ndarray) -> bytes:
    sink = io.BytesIO()
    with tifffile.TiffWriter(sink) as writer:
        for array in arrays:
            writer.write(array, photometric="minisblack", contiguous=False)
    return sink.getvalue()


def good_files() -> Iterator[tuple[str, bytes, np.ndarray]]:
    """Name, content, and the planes that decoding must give."""
    eight = planes()
    yield "8 bit, planes first", tiff(eight, planarconfig="separate"), eight
    yield "8 bit, planes last", tiff(eight.transpose(1, 2, 0), photometric="rgb"), eight
    yield "16 bit in 8 bit range", tiff(planes("uint16"), planarconfig="separate"), eight
    yield "float32", tiff(planes("float32"), planarconfig="separate"), eight
    yield "float64", tiff(planes("float64"), planarconfig="separate"), eight
    yield "int16", tiff(planes("int16"), planarconfig="separate"), eight
    yield "BigTIFF", tiff(eight, planarconfig="separate", bigtiff=True), eight
    yield "big-endian", tiff(planes("uint16"), planarconfig="separate", byteorder=">"), eight
    yield "zlib", tiff(eight, planarconfig="separate", compression="zlib"), eight
    yield "pages", pages(*eight), eight
    yield "four pages", pages(*eight, planes(top=255)[0]), eight
    yield "four planes, the last wild", tiff(_with_fourth(planes("float32"), 9e4), planarconfig="separate"), eight
    yield "LZW by OpenCV", cv2.imencode(".tiff", eight[::-1].transpose(1, 2, 0))[1].tobytes(), eight
    yield "LZW pages by OpenCV", cv2.imencodemulti(".tiff", list(eight))[1].tobytes(), eight
    yield "PNG", cv2.imencode(".png", eight.transpose(1, 2, 0))[1].tobytes(), eight
    yield "grey PNG", cv2.imencode(".png", eight[0])[1].tobytes(), eight[[0, 0, 0]]
    yield "all black", tiff(np.zeros_like(eight), planarconfig="separate"), np.zeros_like(eight)
    raw = planes("uint16", top=4096)
    low, high = raw.min(), raw.max()
    yield "12 bit", tiff(raw, planarconfig="separate"), (raw - low) / np.float32(high - low) * 255


def packed_tiff(values: np.ndarray, bits: int, *, order: str = "<", rows_per_strip: int = 5, **tags: int) -> bytes:
    """A hand-made TIFF of bit-packed integers, as microscopes and cameras store them, in more than one strip.

    `values` is [H, W] or [H, W, 3]. Tags are given by number, as in `t262=0`.
    """
    rows = values.reshape(len(values), -1)
    bit_RVb = rows[..., None] >> np.arange(bits)[::-1] & 1
    packed = np.packbits(bit_RVb.reshape(len(rows), -1).astype(np.uint8), axis=1)
    strips = [packed[top : top + rows_per_strip].tobytes() for top in range(0, len(rows), rows_per_strip)]
    samples = values.shape[2] if values.ndim == 3 else 1
    entries = {256: values.shape[1], 257: len(values), 258: bits, 259: 1, 262: 2 if samples == 3 else 1}
    entries |= {277: samples, 278: rows_per_strip} | {int(name[1:]): value for name, value in tags.items()}
    mark, data_at = {"<": b"II", ">": b"MM"}[order], 8 + 2 + 12 * (len(entries) + 2) + 4
    starts = np.cumsum([data_at, *map(len, strips)])[:-1] + 8 * len(strips)
    tables = struct.pack(f"{order}{2 * len(strips)}I", *starts.tolist(), *map(len, strips))
    pointed = {273: data_at, 279: data_at + 4 * len(strips)}
    table = [(tag, 1, value) for tag, value in entries.items()]
    table += [(tag, len(strips), value) for tag, value in pointed.items()]
    listed = b"".join(struct.pack(f"{order}HHII", tag, 4, count, value) for tag, count, value in sorted(table))
    head = mark + struct.pack(f"{order}HIH", 42, 8, len(table))
    return head + listed + bytes(4) + tables + b"".join(strips)


def bad_files() -> Iterator[tuple[str, bytes]]:
    eight, floats = planes(), planes("float32")
    yield "empty", b""
    yield "text", b"not an image"
    yield "web page", b"<html>404</html>"
    yield "two planes: a reference is missing", tiff(eight[:2], planarconfig="separate")
    yield "one plane", tiff(eight[0])
    yield "five planes", tiff(np.concatenate((eight, eight[:2])), planarconfig="separate")
    yield "pages of other heights", pages(eight[0], eight[1][:-3], eight[2])
    yield "pages of other widths", pages(eight[0], eight[1][:, :-3], eight[2])
    yield "NaN", tiff(np.where(np.arange(SHAPE_HW[1]) == 7, np.nan, floats), planarconfig="separate")
    yield "infinity", tiff(np.where(np.arange(SHAPE_HW[1]) == 7, np.inf, floats), planarconfig="separate")
    yield "complex", tiff(floats.astype(np.complex64))
    yield "cut off", tiff(eight, planarconfig="separate")[:700]
    yield "only a header", b"II*\0\x08\0\0\0"
    packed = planes("uint16", top=4096).transpose(1, 2, 0)
    yield "12 bits, cut off", packed_tiff(packed, 12)[:-200]
    yield "12 bits, cut off before the list of pages", packed_tiff(packed, 12)[:300]
    yield "12 bits, no rows", packed_tiff(packed, 12, t257=0)
    yield "12 bits, no columns", packed_tiff(packed, 12, t256=0)
    yield "12 bits, no values in a pixel", packed_tiff(packed, 12, t277=0)
    yield "more rows than there is data", packed_tiff(packed, 12, t257=9999)
    yield "no rows", packed_tiff(eight.transpose(1, 2, 0), 8, t257=0)
    yield "PNG cut off", cv2.imencode(".png", eight.transpose(1, 2, 0))[1].tobytes()[:60]


def mutations(num: int) -> Iterator[bytes]:
    """Valid files with random bytes changed, some of them truncated."""
    rng = np.random.default_rng(1)
    contents = [content for _, content, _ in good_files()]
    for number in range(num):
        content = bytearray(contents[number % len(contents)])
        for _ in range(int(rng.integers(1, 12))):
            # Mostly in the header: a change in the pixel data only changes a pixel.
            reach = len(content) if rng.random() < 0.3 else min(len(content), 300)
            content[int(rng.integers(0, reach))] = int(rng.integers(0, 256))
        if rng.random() < 0.3:
            del content[int(rng.integers(1, len(content))) :]
        yield bytes(content)


def _with_fourth(three: np.ndarray, value: float) -> np.ndarray:
    return np.concatenate((three, np.full((1, *SHAPE_HW), value, three.dtype)))
