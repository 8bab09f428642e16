"""The few tags of a TIFF directory that matter here; EXIF is such a directory too."""

import struct
from collections.abc import Callable

MOST_ENTRIES = 512

_TAGS = {256: "width", 257: "height", 258: "bits", 274: "orientation", 277: "samples", 50706: "dng_version"}
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


def orientation_in(exif: bytes) -> int:
    """EXIF's orientation, 1 where there is none or the block is damaged."""
    try:
        return TiffTags(lambda offset, count: exif[offset : offset + count]).orientation
    except struct.error:
        return 1
