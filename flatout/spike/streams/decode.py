"""Spikes out of a file's bytes. A crop is cut from the packed bytes first, and only then unpacked.

    memory map [T, bytes of a frame] --rows and bytes of the crop--> small copy --unpack--> [T, h, w] --sums--> counts

Pixel k = y * W + x of the stored raster is bit k % 8, lowest first, of byte k // 8 of its frame.

Dimension key:  T spike frames   H W spike picture   h w crop   F bytes of a frame
"""

import mmap
import os
from pathlib import Path

import numpy as np

from flatout.spike.streams.layout import BEGIN, Content, Layout, StreamError

CONTENT_BYTES = 1 << 20
"""Read at a time to learn what a file holds; a packed file shows it in the first bytes."""


class Box:
    """Rows top..bottom and columns left..right of a picture, ends excluded."""

    __slots__ = ("bottom", "left", "right", "top")

    def __init__(self, top: int, left: int, height: int, width: int) -> None:
        self.top, self.left, self.bottom, self.right = top, left, top + height, left + width


def whole(layout: Layout) -> Box:
    return Box(0, 0, layout.height, layout.width)


def map_stream(path: str | Path, layout: Layout) -> np.ndarray:
    """The bytes of a file as uint8 [T, F], mapped and not read; StreamError if its size is no longer the layout's."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != layout.nbytes:
            raise StreamError(
                f"{path} has {size} bytes where {layout.nbytes} were found when the data set was opened. "
                "Something changes it: run the command again.",
                kind="reshape",
            )
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, np.uint8).reshape(layout.frames, layout.frame_bytes)


def decode(stream_TF: np.ndarray, layout: Layout, box: Box | None = None) -> np.ndarray:
    """Spikes in image orientation, uint8 [T, h, w]; 0 and 1, or any byte in format `bytes`."""
    box = box or whole(layout)
    rows, skip = stored_rows(stream_TF, layout, box)
    return oriented(rows, skip, layout, box)


def stored_rows(stream_TF: np.ndarray, layout: Layout, box: Box) -> tuple[np.ndarray, int]:
    """Rows of the crop as they are stored, uint8 [T, h, at least w], and how many columns to skip.

    Whoever sums over frames does that first, while the bytes lie side by side, and orients the small result.
    """
    top, bottom = box.top, box.bottom
    if layout.flipud:
        top, bottom = layout.height - box.bottom, layout.height - box.top
    if layout.format != "packed":
        return stream_TF.reshape(-1, layout.height, layout.width)[:, top:bottom], box.left
    if layout.width % 8 == 0:
        return _unpack_whole_bytes(stream_TF, layout, top, bottom, box)
    return _unpack_straddling(stream_TF, layout, top, bottom), box.left


def oriented(rows: np.ndarray, skip: int, layout: Layout, box: Box) -> np.ndarray:
    """Stored rows [..., h, at least w] as the crop in image orientation, a view."""
    columns = rows[..., skip : skip + box.right - box.left]
    return columns[..., ::-1, :] if layout.flipud else columns


def content_of(path: str | Path) -> Content:
    """Which values occur in a file; stops at the first byte above 1."""
    found: Content = "zero"
    with open(path, "rb") as file:
        while block := file.read(CONTENT_BYTES):
            largest = int(np.frombuffer(block, np.uint8).max())
            if largest > 1:
                return "bytes"
            found = "binary" if largest else found
    return found


def pack(spikes_THW: np.ndarray, *, flipud: bool = True) -> np.ndarray:
    """The bytes of a packed file, uint8 [T * F]; what `decode` reads back."""
    if spikes_THW.shape[1] * spikes_THW.shape[2] % 8:
        raise StreamError(f"{spikes_THW.shape[1:]} pixels do not fill whole bytes ({BEGIN}).", kind="reshape")
    rows = spikes_THW[:, ::-1] if flipud else spikes_THW
    flat_TK = np.ascontiguousarray(rows, np.uint8).reshape(len(rows), -1)
    return np.packbits(flat_TK, axis=1, bitorder="little").reshape(-1)


def _unpack_whole_bytes(
    stream_TF: np.ndarray, layout: Layout, top: int, bottom: int, box: Box
) -> tuple[np.ndarray, int]:
    """Rows begin on whole bytes: take rows and bytes of the crop, then unpack just those."""
    first, last = box.left // 8, -(-box.right // 8)
    cut = stream_TF.reshape(-1, layout.height, layout.width // 8)[:, top:bottom, first:last]
    # As one row: NumPy unpacks short rows at half the speed.
    bits = np.unpackbits(np.ascontiguousarray(cut).reshape(-1), bitorder="little")
    return bits.reshape(len(cut), bottom - top, 8 * (last - first)), box.left - 8 * first


def _unpack_straddling(stream_TF: np.ndarray, layout: Layout, top: int, bottom: int) -> np.ndarray:
    """Bytes hold pixels of two rows: unpack whole rows."""
    begin, end = top * layout.width, bottom * layout.width
    cut = np.ascontiguousarray(stream_TF[:, begin // 8 : -(-end // 8)])
    bits = np.unpackbits(cut, axis=1, bitorder="little")[:, begin % 8 :][:, : end - begin]
    return bits.reshape(len(cut), bottom - top, layout.width)
