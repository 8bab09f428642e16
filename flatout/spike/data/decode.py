"""Decodes spikes from the bytes of a file; a crop is cut from the packed bytes before unpacking.

    memory map [T, bytes of a frame] --rows and bytes of the crop--> small copy --unpack--> [T, h, w] --sums--> counts

Pixel k = y * W + x of the stored raster is bit k % 8, lowest first, of byte k // 8 of its frame.

Dimension key:  T spike frames   H W spike frame   h w crop   F bytes of a spike frame   K bits of a row of frames
"""

import mmap
import os
from pathlib import Path

import numpy as np

from flatout.spike.data.stream_layout import BEGIN, Content, Layout, StreamError

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""Only on Linux."""
CONTENT_BYTES = 1 << 20
"""Bytes that `content_of` reads at a time; the first ones are enough for a packed file."""


class Box:
    """Rows top..bottom and columns left..right of an image, ends excluded."""

    __slots__ = ("bottom", "left", "right", "top")

    def __init__(self, top: int, left: int, height: int, width: int) -> None:
        self.top, self.left, self.bottom, self.right = top, left, top + height, left + width


def whole_frame(layout: Layout) -> Box:
    return Box(0, 0, layout.height, layout.width)


def map_stream(path: str | Path, layout: Layout) -> np.ndarray:
    """The bytes of a file as uint8 [T, F], memory-mapped; StreamError if its size no longer fits the layout."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != layout.nbytes:
            raise StreamError(
                f"{path} has {size} bytes where {layout.nbytes} were found when the data set was opened. "
                "The file has changed since: run the command again.",
            )
        # All pages at once: read-ahead would load them anyway, and 88 page faults cost more than loading all the pages.
        memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ)
    return np.frombuffer(memory, np.uint8).reshape(layout.frames, layout.frame_bytes)


def decode(stream_TF: np.ndarray, layout: Layout, box: Box | None = None) -> np.ndarray:
    """Decode spikes in image orientation, uint8 [T, h, w]: 0 and 1, or any value in the format `bytes`."""
    box = box or whole_frame(layout)
    rows = StoredRows(stream_TF, layout, box)
    return oriented(rows[0 : len(stream_TF)], rows.skip, layout, box)


class StoredRows:
    """Rows of a crop as they are stored: `rows[begin:end]` is uint8 [frames, h, at least w].

    The bytes of the crop are copied once, and only the requested frames are unpacked, so that they stay in the CPU
    cache. To sum over frames, sum first and apply `oriented` to the small result.
    """

    def __init__(self, stream_TF: np.ndarray, layout: Layout, box: Box) -> None:
        top, bottom = box.top, box.bottom
        if layout.flipud:
            top, bottom = layout.height - box.bottom, layout.height - box.top
        height, width = bottom - top, layout.width
        self.skip = box.left
        """Columns before the crop in each row."""
        self._straddles = 0
        """Pixels before the first one, if a byte holds pixels of two rows."""
        self._is_packed = layout.format == "packed"
        if not self._is_packed:
            self._cut = stream_TF.reshape(-1, layout.height, layout.width)[:, top:bottom]
        elif layout.width % 8 == 0:
            first, last = box.left // 8, -(-box.right // 8)
            cut = stream_TF.reshape(-1, layout.height, layout.width // 8)[:, top:bottom, first:last]
            self._cut = np.ascontiguousarray(cut).reshape(len(cut), -1)
            self.skip, width = box.left - 8 * first, 8 * (last - first)
        else:
            begin, end = top * layout.width, bottom * layout.width
            self._cut = np.ascontiguousarray(stream_TF[:, begin // 8 : -(-end // 8)])
            self._straddles = begin % 8
        self.shape = len(stream_TF), height, width

    def __getitem__(self, frames: slice) -> np.ndarray:
        cut = self._cut[frames]
        if not self._is_packed:
            return cut
        _, height, width = self.shape
        # Unpacked as one row, because NumPy unpacks short rows at half the speed.
        bits_TK = np.unpackbits(cut.reshape(-1), bitorder="little").reshape(len(cut), -1)
        return bits_TK[:, self._straddles :][:, : height * width].reshape(len(cut), height, width)


def oriented(rows: np.ndarray, skip: int, layout: Layout, box: Box) -> np.ndarray:
    """The crop in image orientation from stored rows [..., h, at least w]; a view."""
    columns = rows[..., skip : skip + box.right - box.left]
    return columns[..., ::-1, :] if layout.flipud else columns


def content_of(path: str | Path) -> Content:
    """The kind of values that occur in a file; reading stops at the first byte above 1."""
    found: Content = "zero"
    with open(path, "rb") as file:
        while block := file.read(CONTENT_BYTES):
            largest = int(np.frombuffer(block, np.uint8).max())
            if largest > 1:
                return "bytes"
            found = "binary" if largest else found
    return found


def pack(spikes_THW: np.ndarray, *, flipud: bool = True) -> np.ndarray:
    """The bytes of a packed file, uint8 [T * F]; the inverse of `decode`."""
    if spikes_THW.shape[1] * spikes_THW.shape[2] % 8:
        raise StreamError(f"{spikes_THW.shape[1:]} pixels do not fill whole bytes ({BEGIN}).")
    rows = spikes_THW[:, ::-1] if flipud else spikes_THW
    flat_TK = np.ascontiguousarray(rows, np.uint8).reshape(len(rows), -1)
    return np.packbits(flat_TK, axis=1, bitorder="little").reshape(-1)
