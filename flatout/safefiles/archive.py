"""The zip around a torch file, read with suspicion: every entry has bytes of its own, and the size it claims.

    file --end record--> directory --one Entry each--> {name: Entry} --read--> bytes, checked against their CRC

Written for the few things torch writes, because a general zip reader believes too much: entries that overlap, two of
one name, sizes that lie, a megabyte that inflates to a gigabyte. Nothing is read before it is asked for.

Why a file is not read: found deep inside, completed with the file's name at the door (`opening.reading`).
"""

import hashlib
import os
import re
import struct
import zlib
from typing import Any, BinaryIO, NamedTuple, Protocol

AGAIN = "Download or copy it again."
DAMAGED = f"It is damaged. {AGAIN}"
SUSPECT = "It is damaged or made to exhaust the machine: get it again from a source you trust."


class Refusal(Exception):
    """One or two sentences: what is wrong with the file, and what to do. They follow "FILE: "."""


class Budget:
    """How much a file may make us do; what grows faster than the file ends here."""

    def __init__(self, limit: int, what: str) -> None:
        self._left = self._limit = limit
        self._what = what

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise Refusal(f"it holds more than {self._limit:,} {self._what}, far beyond any known network. {SUSPECT}")


def quoted(text: str, most: int = 80) -> str:
    """Text out of the file, short and on one line, with nothing in it that a terminal would obey."""
    shortened = text if len(text) <= most else text[:most] + "..."
    return shortened if re.fullmatch(r"[A-Za-z0-9_.]+", shortened) else repr(shortened)


# Exact reads at an offset, which end in a Refusal where the file is shorter than it says.
#
# Plain reads, no memory map: a file that shrinks while it is read then is an error and not a crash.


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Exactly these bytes; `nbytes` is allocated at once, so the caller has compared it with the file's size."""
    content = os.pread(fd, nbytes, offset) if offset < 1 << 62 else b""
    if len(content) != nbytes:
        raise _cut_off(nbytes, offset)
    return content


def read_into(fd: int, out: memoryview, offset: int) -> None:
    """Fill `out`, writable bytes."""
    done = 0
    # One call reads at most 2 GiB.
    while done < len(out):
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            raise _cut_off(len(out), offset)
        done += count


def _cut_off(nbytes: int, offset: int) -> Refusal:
    return Refusal(f"is cut off: {nbytes:,} bytes at {offset:,} are not there. {AGAIN}")


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
    """One file of the zip, as its directory describes it."""

    name: str
    method: int
    flags: int
    crc: int
    packed_bytes: int
    nbytes: int
    header_offset: int
    end_offset: int
    """Where the next entry or the directory begins: our bytes lie before it."""


class Archive:
    """The entries of a zip file; borrows `file`, which must stay open while entries are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._fd = file.fileno()
        size = os.fstat(self._fd).st_size
        self._entries = _read_directory(self._fd, size)
        _check_inflation(self._entries, size)
        # torch can be told to write no checksums; then it writes zeros.
        self._has_checksums = any(entry.crc for entry in self._entries.values())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def nbytes(self, name: str) -> int:
        """Size of an entry's content, as the directory says and the reading checks."""
        return self._entry(name).nbytes

    def read(self, name: str, *, limit: int) -> bytes:
        """The whole content of a small entry."""
        if self.nbytes(name) > limit:
            raise Refusal(
                f"its entry {quoted(name)} has {self.nbytes(name):,} bytes; at most {limit:,} are read. {SUSPECT}"
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
        """Behind the entry's own header, which must tell the same story as the directory."""
        header = read_at(self._fd, _LOCAL.size, entry.header_offset)
        fields: tuple[Any, ...] = _LOCAL.unpack(header)
        signature, _, _, method, *_, name_bytes, extra_bytes = fields
        name = read_at(self._fd, name_bytes, entry.header_offset + _LOCAL.size)
        offset: int = entry.header_offset + _LOCAL.size + name_bytes + extra_bytes
        if (signature, method, name) != (b"PK\x03\x04", entry.method, entry.name.encode()):
            raise Refusal(f"its entry {quoted(entry.name)} contradicts the zip directory. {AGAIN}")
        if offset + entry.packed_bytes > entry.end_offset:
            raise Refusal(f"its entry {quoted(entry.name)} overlaps the next one. {AGAIN}")
        return offset


def _read_directory(fd: int, size: int) -> dict[str, Entry]:
    num_entries, nbytes, offset, end = _find_directory(fd, size)
    if num_entries > MAX_ENTRIES:
        raise Refusal(f"is a zip of {num_entries:,} entries; weights have at most {MAX_ENTRIES:,}. {SUSPECT}")
    if offset + nbytes != end or num_entries * _DIRECTORY.size > nbytes:
        raise Refusal(f"is a damaged zip: its directory is not where its end says. {AGAIN}")
    entries = _parse_directory(read_at(fd, nbytes, offset), num_entries)
    # In the order of their bytes, so that each entry knows where it must have ended.
    entries.sort(key=lambda entry: entry.header_offset)
    ends = [entry.header_offset for entry in entries[1:]] + [offset]
    placed = {entry.name: _placed(entry, end) for entry, end in zip(entries, ends, strict=True)}
    if len(placed) != num_entries:
        raise Refusal(f"is a zip with two entries of one name. {AGAIN}")
    return placed


def _placed(entry: Entry, end_offset: int) -> Entry:
    if entry.header_offset + _LOCAL.size + len(entry.name.encode()) + entry.packed_bytes > end_offset:
        raise Refusal(f"is a zip whose entry {quoted(entry.name)} overlaps another one or the directory. {AGAIN}")
    return entry._replace(end_offset=end_offset)


def _check_inflation(entries: dict[str, Entry], size: int) -> None:
    """Before anything is allocated: what all compressed entries claim together."""
    claimed = sum(entry.nbytes for entry in entries.values() if entry.method == _DEFLATED)
    limit = INFLATED_FREE + INFLATED_PER_BYTE * size
    if claimed > limit:
        raise Refusal(
            f"is a zip of {size:,} bytes that would inflate to {claimed:,}; at most {limit:,} are allowed. {SUSPECT}"
        )


def _find_directory(fd: int, size: int) -> tuple[int, int, int, int]:
    """Number of entries, size and offset of the directory, and where it must end."""
    tail_bytes = min(size, _END.size + _MAX_COMMENT)
    tail = read_at(fd, tail_bytes, size - tail_bytes)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        raise Refusal(f"is cut off: the directory at the end of the zip is missing. {AGAIN}")
    _, disk, first_disk, here, num_entries, nbytes, offset, _ = _END.unpack_from(tail, at)
    end = size - tail_bytes + at
    # The 64-bit record is read wherever there is one: torch also writes it where the short fields would do.
    if end >= _LOCATOR_64.size:
        signature, _, end_64, _ = _LOCATOR_64.unpack(read_at(fd, _LOCATOR_64.size, end - _LOCATOR_64.size))
        if signature == b"PK\x06\x07":
            return _find_directory_64(fd, end_64, end - _LOCATOR_64.size)
    if disk or first_disk or here != num_entries:
        raise Refusal(f"is one part of a zip in several parts. {AGAIN}")
    return num_entries, nbytes, offset, end


def _find_directory_64(fd: int, end: int, locator: int) -> tuple[int, int, int, int]:
    if end + _END_64.size > locator:
        raise Refusal(f"is a damaged zip: its end record is not where its locator says. {AGAIN}")
    signature, *_, here, num_entries, nbytes, offset = _END_64.unpack(read_at(fd, _END_64.size, end))
    if signature != b"PK\x06\x06" or here != num_entries:
        raise Refusal(f"is a damaged zip: its end record makes no sense. {AGAIN}")
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
        raise Refusal(f"is a damaged zip: its directory makes no sense. {AGAIN}")
    if flags & _ENCRYPTED:
        raise Refusal("is an encrypted zip. Decrypt it first; torch never encrypts.")
    nbytes, packed_bytes, offset = _widened((nbytes, packed_bytes, offset), extra)
    if method not in (_STORED, _DEFLATED):
        raise Refusal(f"is a zip compressed by method {method}, which torch never uses. Save it again.")
    if method == _STORED and packed_bytes != nbytes:
        raise Refusal(f"its entry {quoted(name)} claims {nbytes:,} bytes but has {packed_bytes:,}. {AGAIN}")
    return Entry(name, method, flags, crc, packed_bytes, nbytes, offset, 0)


def _widened(values: tuple[int, int, int], extra: bytes) -> list[int]:
    """The 64-bit values of those that do not fit into 32 bits, from the extra field 1."""
    wide = _extra_field(extra, 1)
    numbers = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
    widened = [next(numbers, -1) if value == 0xFFFFFFFF else value for value in values]
    if min(widened) < 0:
        raise Refusal(f"is a damaged zip: a size beyond 4 GiB is missing. {AGAIN}")
    return widened


def _extra_field(extra: bytes, wanted: int) -> bytes:
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == wanted:
            return extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    return b""


def _inflate(packed: bytes, entry: Entry) -> bytes:
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # One byte more than claimed is asked for, so that a lie shows without being inflated.
        content = unpacker.decompress(packed, entry.nbytes + 1)
    except zlib.error:
        raise Refusal(f"its entry {quoted(entry.name)} cannot be decompressed. {AGAIN}") from None
    if len(content) != entry.nbytes:
        raise Refusal(f"its entry {quoted(entry.name)} does not inflate to the size it claims. {AGAIN}")
    return content


# A SHA-256 of the whole file inside the file: every flipped bit is found, wherever it is.
#
#     torch.save --> DigestSink --> zip ... end record | comment "flatout sha256 <64 hex digits>"
#
# The checksums of a zip cover the content of its entries, not what lies around them. The digest stands in the comment
# with which any zip may end, and covers every byte before it. Readers of zips, torch among them, skip comments.

ALGORITHM = "sha256"
_LABEL = f"flatout {ALGORITHM} ".encode()
_COMMENT_BYTES = len(_LABEL) + 2 * hashlib.sha256().digest_size
_END_RECORD_BYTES = 22
_LENGTH_BYTES = 2
"""The end record of a zip closes with the length of its comment."""
_CHUNK_BYTES = 4 << 20


class ByteSink(Protocol):
    """Takes bytes and says how many it took."""

    def write(self, content: bytes | memoryview, /) -> int: ...


class DigestSink:
    """Passes a zip without comment on to `sink`, and ends it with a comment that holds its digest."""

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()
        # The last bytes so far: they are the end record once nothing follows.
        self._held = b""

    def write(self, content: bytes | memoryview) -> int:
        """How many bytes were taken: all, or none once the sink takes no more."""
        view = memoryview(content).cast("B")
        if len(view) < _END_RECORD_BYTES:
            joined = self._held + bytes(view)
            taken = self._pass_on(joined[:-_END_RECORD_BYTES])
            self._held = joined[-_END_RECORD_BYTES:]
        else:
            taken = self._pass_on(self._held) and self._pass_on(view[:-_END_RECORD_BYTES])
            self._held = bytes(view[-_END_RECORD_BYTES:])
        return len(view) if taken else 0

    def flush(self) -> None:
        """Nothing to do: `finish` writes the rest."""

    def finish(self) -> None:
        """Write the end record with the length of the comment, then the comment."""
        assert self._held.startswith(b"PK\x05\x06") and self._held.endswith(bytes(_LENGTH_BYTES)), "not a whole zip"
        self._pass_on(self._held[:-_LENGTH_BYTES] + _COMMENT_BYTES.to_bytes(_LENGTH_BYTES, "little"))
        self._sink.write(_LABEL + self._hash.hexdigest().encode())

    def _pass_on(self, content: bytes | memoryview) -> bool:
        self._hash.update(content)
        return not len(content) or self._sink.write(content) == len(content)


def has_digest(file: BinaryIO) -> bool:
    return _comment_of(file).startswith(_LABEL)


def check_digest(file: BinaryIO) -> None:
    """A Refusal if the file has a digest that is not its content's. Reads the whole file."""
    comment = _comment_of(file)
    if comment.startswith(_LABEL) and comment != _LABEL + _digest_of(file).encode():
        raise Refusal(f"is damaged: its {ALGORITHM} differs from the one it was written with. {AGAIN}")


def _comment_of(file: BinaryIO) -> bytes:
    """The last bytes of the file, as many as the comment has."""
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
