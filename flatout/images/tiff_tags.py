"""The few tags of a TIFF directory that matter here; EXIF is such a directory too, read as OpenCV reads it."""

import struct
from collections.abc import Callable

MOST_ENTRIES = 512

_TAGS = {
    256: "width",
    257: "height",
    258: "bits",
    259: "compression",
    274: "orientation",
    277: "samples",
    50706: "dng_version",
}
_ORIENTATION = 274
_EXIF_TEXTS = {270, 271, 272, 305, 306, 33432}
_EXIF_FRACTIONS = {282: 1, 283: 1, 318: 2, 319: 6, 529: 3, 532: 6}
_SIZES = {1: 1, 3: 2, 4: 4, 16: 8}
_LETTERS = {1: "B", 3: "H", 4: "I", 16: "Q"}


class TiffTags:
    """The first directory of a TIFF, classic or BigTIFF; struct.error where it is cut off."""

    def __init__(self, read_at: Callable[[int, int], bytes]) -> None:
        start = read_at(0, 16)
        self._order = {b"II": "<", b"MM": ">"}.get(start[:2], "")
        if not self._order:
            raise struct.error("no byte order")
        (magic,) = struct.unpack(f"{self._order}H", start[2:4])
        big = magic == 43
        # Offset of the directory; then layouts of: number of entries, one entry, offset of the next directory.
        (offset,) = struct.unpack(f"{self._order}{'Q' if big else 'I'}", start[8:16] if big else start[4:8])
        count, entry, after = ("Q", "HHQ8s", "Q") if big else ("H", "HHI4s", "I")
        self._values: dict[str, int] = {}
        self._read(read_at, offset, count, f"{self._order}{entry}", after)

    def first(self, name: str) -> int | None:
        """The first number of a tag."""
        return self._values.get(name)

    @property
    def orientation(self) -> int:
        """1 to 8; what is outside means nothing, so it is 1."""
        value = self._values.get("orientation", 1)
        return value if 1 <= value <= 8 else 1

    def _read(self, read_at: Callable[[int, int], bytes], offset: int, count: str, entry: str, after: str) -> None:
        count_bytes, entry_bytes = struct.calcsize(f"{self._order}{count}"), struct.calcsize(entry)
        (num_entries,) = struct.unpack(f"{self._order}{count}", read_at(offset, count_bytes))
        if num_entries > MOST_ENTRIES:
            raise struct.error("too many entries")
        begin = offset + count_bytes
        table = read_at(begin, num_entries * entry_bytes)
        for tag, kind, length, value in struct.iter_unpack(entry, table):
            if tag in _TAGS and kind in _SIZES and length:
                self._values[_TAGS[tag]] = self._number(read_at, kind, length, value)
        rest = read_at(begin + num_entries * entry_bytes, struct.calcsize(f"{self._order}{after}"))
        self.next_page = any(rest)

    def _number(self, read_at: Callable[[int, int], bytes], kind: int, length: int, value: bytes) -> int:
        """The first of a tag's numbers: inside its entry, or where the entry points to."""
        size = _SIZES[kind]
        if size * length > len(value):
            (at,) = struct.unpack(f"{self._order}{'Q' if len(value) == 8 else 'I'}", value)
            value = read_at(at, size)
        (number,) = struct.unpack(f"{self._order}{_LETTERS[kind]}", value[:size])
        return int(number)


def orientation_in(exif: bytes) -> int | None:
    """EXIF's orientation as OpenCV reads it: 1 where it has none, None where no entry can be read.

    The first such entry counts, whatever kind of number it says it is. What stands after an entry that points beyond
    the block is not read, what stands before it is.
    """
    order = {b"II": "<", b"MM": ">"}.get(exif[:2], "")
    found: int | None = None
    try:
        magic, directory = struct.unpack_from(f"{order}HI", exif, 2)
        if not order or magic != 42:
            return None
        (num_entries,) = struct.unpack_from(f"{order}H", exif, directory)
        for at in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            (tag,) = struct.unpack_from(f"{order}H", exif, at)
            if tag == _ORIENTATION:
                (value,) = struct.unpack_from(f"{order}H", exif, at + 8)
                return value if 1 <= value <= 8 else 1
            _check_entry(exif, order, tag, at)
            found = 1
    except struct.error:
        pass
    return found


def _check_entry(exif: bytes, order: str, tag: int, at: int) -> None:
    """struct.error where an entry of a kind that OpenCV reads points beyond the block."""
    if tag in _EXIF_TEXTS:
        length, offset = struct.unpack_from(f"{order}II", exif, at + 4)
        if length > 4:
            struct.unpack_from(f"{length}x", exif, offset)
    elif tag in _EXIF_FRACTIONS:
        (offset,) = struct.unpack_from(f"{order}I", exif, at + 8)
        struct.unpack_from(f"{8 * _EXIF_FRACTIONS[tag]}x", exif, offset)
