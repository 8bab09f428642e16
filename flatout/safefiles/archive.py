"""A strict reader of the zip archive around a torch file, and the SHA-256 digest at the end of our own files.

    file --end record--> directory --one Entry each--> {name: Entry} --read--> bytes, checked against their CRC
    torch.save --> DigestSink --> zip ... end record | comment "flatout sha256 <64 hex digits>"

Written for the few features that torch uses, because a general zip reader accepts too much: overlapping entries, two
entries of the same name, wrong sizes, a megabyte that inflates to a gigabyte. Entries are read only on request. Errors
are raised as `Refusal`, which `open_file.reading` turns into a CheckpointError with the file's name.
"""

import hashlib
import os
import re
import struct
import zlib
from typing import Any, BinaryIO, NamedTuple

from flatout.safefiles.atomic import Sink

AGAIN = "Download or copy it again."
DAMAGED = f"It is damaged. {AGAIN}"
YOURS = "If the file is yours, load it with torch and save only its tensors and plain values."
SUSPECT = "It is damaged or crafted to exhaust memory: get it again from a source you trust."


class Refusal(Exception):
    """A file that is not read. The text, one or two sentences that follow "FILE: ", says why and what to do."""


class WorkLimit:
    """An upper limit on the work that a file can cause; Refusal once it is exceeded."""

    def __init__(self, limit: int, what: str) -> None:
        self._left = self._limit = limit
        self._what = what

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise Refusal(f"it holds more than {self._limit:,} {self._what}, far beyond any known network. {SUSPECT}")


def quoted(text: str, most: int = 80) -> str:
    """Text from the file made safe to print: shortened, on one line, without terminal control characters."""
    shortened = text if len(text) <= most else text[:most] + "..."
    return shortened if re.fullmatch(r"[A-Za-z0-9_.]+", shortened) else repr(shortened)


# Exact reads at an offset
#
# Plain reads instead of a memory map: a file that shrinks while it is read then causes an error and not a crash.


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Exactly these bytes; Refusal if the file is shorter. `nbytes` is allocated at once: compare it with the file's
    size first."""
    content = os.pread(fd, nbytes, offset) if offset < 1 << 62 else b""
    if len(content) != nbytes:
        raise _cut_off(nbytes, offset)
    return content


def read_into(fd: int, out: memoryview, offset: int) -> None:
    """Fill `out`, which must be writable; Refusal if the file is shorter."""
    done = 0
    # One call reads at most 2 GiB.
    while done < len(out):
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            raise _cut_off(len(out), offset)
        done += count


def _cut_off(nbytes: int, offset: int) -> Refusal:
    return Refusal(f"is truncated: {nbytes:,} bytes at offset {offset:,} are missing. {AGAIN}")


# The zip archive

MAX_ENTRIES = 50_000
"""The largest network of the YOLOv7 family, with its moving average and optimizer, has about 4,000."""
INFLATED_PER_BYTE, INFLATED_FREE = 4, 64 << 20
"""Compressed entries may grow to 4 bytes per byte of the file and 64 MiB; torch never compresses."""

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_DIRECTORY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 0xFFFF
_ENCRYPTED = 1 | 1 << 6 | 1 << 13
_STORED, _DEFLATED = 0, 8


class Entry(NamedTuple):
    """One file in the archive, as the directory describes it."""

    name: str
    method: int
    flags: int
    crc: int
    packed_bytes: int
    nbytes: int
    header_offset: int
    end_offset: int
    """Start of the next entry or of the directory: the content must end before it."""


class Archive:
    """The entries of a zip file, read strictly; Refusal if it is damaged or suspect.

    `file` stays the caller's and must stay open while entries are read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._fd = file.fileno()
        size = os.fstat(self._fd).st_size
        self._entries = _read_directory(self._fd, size)
        _check_inflation(self._entries, size)
        # With checksums disabled, torch writes zeros.
        self._has_checksums = any(entry.crc for entry in self._entries.values())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def nbytes(self, name: str) -> int:
        """Size of an entry's content according to the directory; checked when it is read."""
        return self._entry(name).nbytes

    def read(self, name: str, *, limit: int) -> bytes:
        """The whole content of an entry; Refusal if it has more than `limit` bytes or is damaged."""
        if self.nbytes(name) > limit:
            raise Refusal(
                f"its entry {quoted(name)} has {self.nbytes(name):,} bytes; at most {limit:,} are allowed. {SUSPECT}"
            )
        content = bytearray(self.nbytes(name))
        self.read_into(name, memoryview(content))
        return bytes(content)

    def read_into(self, name: str, out: memoryview) -> None:
        """Fill `out`, writable bytes of exactly the entry's size."""
        entry = self._entry(name)
        offset = self._content_offset(entry)
        if entry.method == _STORED:
            read_into(self._fd, out, offset)
        else:
            out[:] = _inflate(read_at(self._fd, entry.packed_bytes, offset), entry)
        if self._has_checksums and zlib.crc32(out) != entry.crc:
            raise Refusal(f"its entry {quoted(entry.name)} is damaged: the checksum differs. {AGAIN}")

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise Refusal(f"its entry {quoted(name)} is missing. {AGAIN}")
        return self._entries[name]

    def _content_offset(self, entry: Entry) -> int:
        """Offset of the content, after the entry's own header, which must agree with the directory."""
        header = read_at(self._fd, _LOCAL.size, entry.header_offset)
        fields: tuple[Any, ...] = _LOCAL.unpack(header)
        signature, _, _, method, *_, name_bytes, extra_bytes = fields
        name = read_at(self._fd, name_bytes, entry.header_offset + _LOCAL.size)
        offset: int = entry.header_offset + _LOCAL.size + name_bytes + extra_bytes
        if (signature, method, name) != (b"PK\x03\x04", entry.method, entry.name.encode()):
            raise Refusal(f"its entry {quoted(entry.name)} does not match the zip directory. {AGAIN}")
        if offset + entry.packed_bytes > entry.end_offset:
            raise Refusal(f"its entry {quoted(entry.name)} overlaps the next one. {AGAIN}")
        return offset


def _read_directory(fd: int, size: int) -> dict[str, Entry]:
    num_entries, nbytes, offset, end = _find_directory(fd, size)
    if num_entries > MAX_ENTRIES:
        raise Refusal(f"is a zip of {num_entries:,} entries; weights have at most {MAX_ENTRIES:,}. {SUSPECT}")
    if offset + nbytes != end or num_entries * _DIRECTORY.size > nbytes:
        raise Refusal(f"is a damaged zip: its directory is not where the end record says. {AGAIN}")
    entries = _parse_directory(read_at(fd, nbytes, offset), num_entries)
    # In file order, so that each entry must end where the next one starts.
    entries.sort(key=lambda entry: entry.header_offset)
    ends = [entry.header_offset for entry in entries[1:]] + [offset]
    placed = {entry.name: _placed(entry, end) for entry, end in zip(entries, ends, strict=True)}
    if len(placed) != num_entries:
        raise Refusal(f"is a zip with two entries of the same name. {AGAIN}")
    return placed


def _placed(entry: Entry, end_offset: int) -> Entry:
    if entry.header_offset + _LOCAL.size + len(entry.name.encode()) + entry.packed_bytes > end_offset:
        raise Refusal(f"is a zip whose entry {quoted(entry.name)} overlaps another one or the directory. {AGAIN}")
    return entry._replace(end_offset=end_offset)


def _check_inflation(entries: dict[str, Entry], size: int) -> None:
    """Check the claimed total size of all compressed entries, before anything is allocated."""
    claimed = sum(entry.nbytes for entry in entries.values() if entry.method == _DEFLATED)
    limit = INFLATED_FREE + INFLATED_PER_BYTE * size
    if claimed > limit:
        raise Refusal(
            f"is a zip of {size:,} bytes that would inflate to {claimed:,}; at most {limit:,} are allowed. {SUSPECT}"
        )


def _find_directory(fd: int, size: int) -> tuple[int, int, int, int]:
    """Number of entries, size and offset of the directory, and the offset at which it must end."""
    tail_bytes = min(size, _END.size + _MAX_COMMENT)
    tail = read_at(fd, tail_bytes, size - tail_bytes)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        raise Refusal(f"is truncated: the directory at the end of the zip is missing. {AGAIN}")
    _, disk, first_disk, here, num_entries, nbytes, offset, _ = _END.unpack_from(tail, at)
    end = size - tail_bytes + at
    # The 64-bit record is used wherever there is one: torch writes it even where 32 bits would do.
    if end >= _LOCATOR_64.size:
        signature, _, end_64, _ = _LOCATOR_64.unpack(read_at(fd, _LOCATOR_64.size, end - _LOCATOR_64.size))
        if signature == b"PK\x06\x07":
            return _find_directory_64(fd, end_64, end - _LOCATOR_64.size)
    if disk or first_disk or here != num_entries:
        raise Refusal(f"is one part of a multi-part zip. {AGAIN}")
    return num_entries, nbytes, offset, end


def _find_directory_64(fd: int, end: int, locator: int) -> tuple[int, int, int, int]:
    if end + _END_64.size > locator:
        raise Refusal(f"is a damaged zip: its end record is not where the locator says. {AGAIN}")
    signature, *_, here, num_entries, nbytes, offset = _END_64.unpack(read_at(fd, _END_64.size, end))
    if signature != b"PK\x06\x06" or here != num_entries:
        raise Refusal(f"is a damaged zip: its end record is invalid. {AGAIN}")
    return num_entries, nbytes, offset, end


def _parse_directory(directory: bytes, num_entries: int) -> list[Entry]:
    entries, at = [], 0
    for _ in range(num_entries):
        if at + _DIRECTORY.size > len(directory):
            raise Refusal(f"is a damaged zip: its directory ends too early. {AGAIN}")
        fields = _DIRECTORY.unpack_from(directory, at)
        name_bytes, extra_bytes, comment_bytes = fields[10:13]
        name_at = at + _DIRECTORY.size
        extra_at = name_at + name_bytes
        at = extra_at + extra_bytes + comment_bytes
        entries.append(_entry(fields, directory[name_at:extra_at], directory[extra_at : extra_at + extra_bytes]))
    return entries


def _entry(fields: tuple[Any, ...], raw_name: bytes, extra: bytes) -> Entry:
    signature, _, _, flags, method, _, _, crc, packed_bytes, nbytes, *_, offset = fields
    try:
        name = raw_name.decode()
    except UnicodeDecodeError:
        raise Refusal(f"is a damaged zip: the name of an entry is not text. {AGAIN}") from None
    if signature != b"PK\x01\x02":
        raise Refusal(f"is a damaged zip: its directory is invalid. {AGAIN}")
    if flags & _ENCRYPTED:
        raise Refusal("is an encrypted zip. Decrypt it first; torch never encrypts.")
    nbytes, packed_bytes, offset = _widened((nbytes, packed_bytes, offset), extra)
    if method not in (_STORED, _DEFLATED):
        raise Refusal(f"is a zip with compression method {method}, which torch never uses. Save it again.")
    if method == _STORED and packed_bytes != nbytes:
        raise Refusal(f"its entry {quoted(name)} claims {nbytes:,} bytes but has {packed_bytes:,}. {AGAIN}")
    return Entry(name, method, flags, crc, packed_bytes, nbytes, offset, 0)


def _widened(values: tuple[int, int, int], extra: bytes) -> list[int]:
    """The values, with those that do not fit into 32 bits replaced by their 64-bit values from extra field 1."""
    wide = _extra_field(extra, 1)
    numbers = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
    widened = [next(numbers, -1) if value == 0xFFFFFFFF else value for value in values]
    if min(widened) < 0:
        raise Refusal(f"is a damaged zip: a 64-bit size is missing. {AGAIN}")
    return widened


def _extra_field(extra: bytes, number: int) -> bytes:
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == number:
            return extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    return b""


def _inflate(packed: bytes, entry: Entry) -> bytes:
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # One byte more than claimed is requested, which reveals a wrong size without inflating everything.
        content = unpacker.decompress(packed, entry.nbytes + 1)
    except zlib.error:
        raise Refusal(f"its entry {quoted(entry.name)} cannot be decompressed. {AGAIN}") from None
    if len(content) != entry.nbytes:
        raise Refusal(f"its entry {quoted(entry.name)} does not inflate to the size it claims. {AGAIN}")
    return content


# The digest
#
# The checksums of a zip cover the content of its entries, not the bytes between them. A SHA-256 of the whole file finds
# every flipped bit. It is stored in the comment at the end of the zip, which torch and other readers skip, and covers
# every byte before it.

ALGORITHM = "sha256"
_LABEL = f"flatout {ALGORITHM} ".encode()
_COMMENT_BYTES = len(_LABEL) + 2 * hashlib.sha256().digest_size
_END_RECORD_BYTES = 22
_LENGTH_BYTES = 2
"""The end record of a zip closes with the length of its comment."""
_CHUNK_BYTES = 4 << 20


class DigestSink:
    """Writes a zip without comment to `sink` and appends a comment with its digest."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()
        # The last bytes so far, held back because they may be the end record.
        self._held = b""

    def write(self, content: bytes | memoryview) -> int:
        """Write `content`; returns its length, or 0 if the sink failed to write."""
        view = memoryview(content).cast("B")
        if len(view) < _END_RECORD_BYTES:
            joined = self._held + bytes(view)
            written = self._forward(joined[:-_END_RECORD_BYTES])
            self._held = joined[-_END_RECORD_BYTES:]
        else:
            written = self._forward(self._held) and self._forward(view[:-_END_RECORD_BYTES])
            self._held = bytes(view[-_END_RECORD_BYTES:])
        return len(view) if written else 0

    def flush(self) -> None:
        """Nothing to do: `finish` writes the rest."""

    def finish(self) -> None:
        """Write the end record with the length of the comment, then the comment."""
        assert self._held.startswith(b"PK\x05\x06") and self._held.endswith(bytes(_LENGTH_BYTES)), "not a complete zip"
        self._forward(self._held[:-_LENGTH_BYTES] + _COMMENT_BYTES.to_bytes(_LENGTH_BYTES, "little"))
        self._sink.write(_LABEL + self._hash.hexdigest().encode())

    def _forward(self, content: bytes | memoryview) -> bool:
        self._hash.update(content)
        return not len(content) or self._sink.write(content) == len(content)


def has_digest(file: BinaryIO) -> bool:
    return _comment_of(file).startswith(_LABEL)


def check_digest(file: BinaryIO) -> None:
    """Refusal if the file has a digest that does not match its content. Reads the whole file."""
    comment = _comment_of(file)
    if comment.startswith(_LABEL) and comment != _LABEL + _digest_of(file).encode():
        raise Refusal(f"is damaged: its {ALGORITHM} is not the one it was written with. {AGAIN}")


def _comment_of(file: BinaryIO) -> bytes:
    """The last bytes of the file, as many as a digest comment has."""
    return read_at(file.fileno(), _COMMENT_BYTES, at) if (at := _covered_bytes(file)) > 0 else b""


def _covered_bytes(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size - _COMMENT_BYTES


def _digest_of(file: BinaryIO) -> str:
    digest, nbytes = hashlib.sha256(), _covered_bytes(file)
    chunk = memoryview(bytearray(min(_CHUNK_BYTES, nbytes)))
    for offset in range(0, nbytes, _CHUNK_BYTES):
        part = chunk[: nbytes - offset]
        read_into(file.fileno(), part, offset)
        digest.update(part)
    return digest.hexdigest()
