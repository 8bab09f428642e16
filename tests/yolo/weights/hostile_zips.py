"""Zips with false sizes, offsets, names and checksums."""

import struct
import zipfile
import zlib
from collections.abc import Iterator

from tests.yolo.weights.pickle_bytes import checkpoint, entries_of, tensor, torch_file, zip_bytes

GOOD = torch_file(checkpoint())
DIRECTORY = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")
END = struct.Struct("<4s4H2LH")
# Offsets of fields in a directory entry.
FLAGS, METHOD, CRC, PACKED, SIZE, OFFSET = 8, 10, 16, 20, 24, 42


def zips() -> Iterator[tuple[str, bytes, list[str]]]:
    """Case name, file content, and words that the error message must contain."""
    yield from _bombs()
    yield from _false_directories()
    yield from _false_ends()
    yield from _wrong_contents()


def _bombs() -> Iterator[tuple[str, bytes, list[str]]]:
    entries = entries_of(checkpoint())
    zeros = zip_bytes(entries | {"last/data/0": bytes(100 << 20)}, zipfile.ZIP_DEFLATED)
    yield "zip-bomb-1000-to-1", zeros, ["would inflate to 104,857"]
    understated = zip_bytes(entries | {"last/data/0": bytes(20 << 20)}, zipfile.ZIP_DEFLATED)
    yield "zip-bomb-understated", _patched(understated, b"last/data/0", SIZE, 16), ["does not inflate to the size"]
    overstated = zip_bytes(entries, zipfile.ZIP_DEFLATED)
    yield "zip-bomb-overstated", _patched(overstated, b"last/data/0", SIZE, 0xFFFFFFF0), ["would inflate to"]
    yield "zip-bomb-pickle", zip_bytes(entries | {"last/data.pkl": bytes(40 << 20)}, zipfile.ZIP_DEFLATED), ["at most"]
    yield "zip-bomb-overlapping", _overlapping(2_000), ["overlaps"]
    yield "zip-bomb-quoted", _same_entry_many_times(2_000), ["overlaps"]
    yield "zip-bomb-nested", zip_bytes({"last/data.pkl.zip": zeros}), ["must hold exactly one data.pkl"]
    yield "zip-bomb-entries", _many_entries(100_000), ["100,000 entries"]


def _false_directories() -> Iterator[tuple[str, bytes, list[str]]]:
    blob, pkl = b"last/data/0", b"last/data.pkl"
    yield "zip-encrypted", _patched(GOOD, blob, FLAGS, 1, "<H"), ["encrypted"]
    yield "zip-wrong-crc", _patched(GOOD, blob, CRC, 1), ["checksum differs"]
    yield "zip-wrong-crc-pickle", _patched(GOOD, pkl, CRC, 1), ["checksum differs"]
    yield "zip-method-bzip2", _patched(GOOD, blob, METHOD, 12, "<H"), ["method 12"]
    yield "zip-method-disagrees", _patched(GOOD, blob, METHOD, 8, "<H"), ["does not match"]
    yield "zip-size-larger", _patched(GOOD, blob, SIZE, 1 << 30), ["claims"]
    yield "zip-both-sizes-larger", _patched(_patched(GOOD, blob, SIZE, 1 << 30), blob, PACKED, 1 << 30), ["overlaps"]
    yield "zip-size-64-missing", _patched(GOOD, blob, SIZE, 0xFFFFFFFF), ["64-bit size is missing"]
    yield "zip-offset-beyond", _patched(GOOD, blob, OFFSET, 0xFFFFFFF0), ["overlaps"]
    yield "zip-offset-of-another", _patched(GOOD, blob, OFFSET, 0), ["overlaps"]
    yield "zip-name-disagrees", GOOD.replace(blob, b"last/data/9", 1), ["does not match"]
    yield "zip-name-not-text", GOOD.replace(blob, b"last/data/\xff"), ["not text"]
    yield "zip-directory-garbled", GOOD.replace(b"PK\x01\x02", b"PK\x01\x09", 1), ["is invalid"]
    yield (
        "zip-two-of-one-name",
        zip_bytes(entries_of(checkpoint()) | {"last/data/1": b"x"}).replace(b"last/data/1", b"last/data/0"),
        ["two entries of the same name"],
    )


def _false_ends() -> Iterator[tuple[str, bytes, list[str]]]:
    end = GOOD.rindex(b"PK\x05\x06")
    fields = list(END.unpack_from(GOOD, end))
    for case, index, value, words in (
        ("more-entries", 4, 60_000, "one part"),
        ("no-entries", 4, 0, "one part"),
        ("directory-size", 5, 1 << 30, "not where the end record says"),
        ("directory-place", 6, 1 << 30, "not where the end record says"),
        ("several-disks", 1, 3, "one part"),
    ):
        changed = [*fields[:index], value, *fields[index + 1 :]]
        yield f"zip-end-{case}", GOOD[:end] + END.pack(*changed), [words]
    both = [*fields[:3], 40_000, 40_000, *fields[5:]]
    yield "zip-end-claims-more", GOOD[:end] + END.pack(*both), ["not where the end record says"]
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 1 << 63, 1)
    yield "zip-end-64-beyond", GOOD[:end] + locator + GOOD[end:], ["not where the locator says"]
    wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 5, 5, 1 << 62, 1 << 62)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    yield "zip-end-64-lies", GOOD[:end] + wide + locator + GOOD[end:], ["not where the end record says"]
    yield "zip-prefixed", GOOD[:30] + GOOD, ["not where the end record says"]
    yield "zip-appended", GOOD + b"x" * 70_000, ["truncated"]
    yield "zip-only-local-header", GOOD[:40], ["truncated"]
    yield "zip-empty", zip_bytes({}), ["empty zip"]
    for percent in range(4, 100, 5):
        yield f"zip-cut-at-{percent:02}-percent", GOOD[: len(GOOD) * percent // 100], ["truncated"]


def _wrong_contents() -> Iterator[tuple[str, bytes, list[str]]]:
    entries = entries_of(checkpoint())
    yield "zip-two-pickles", zip_bytes(entries | {"other/data.pkl": b"x"}), ["must hold exactly one data.pkl"]
    yield "zip-no-pickle", zip_bytes({"weights.npy": b"x"}), ["must hold exactly one data.pkl"]
    yield "zip-torchscript", zip_bytes(entries | {"last/constants.pkl": b"x"}), ["TorchScript"]
    yield "zip-big-endian", zip_bytes(entries | {"last/byteorder": b"big"}), ["big-endian"]
    yield "zip-empty-pickle", zip_bytes(entries | {"last/data.pkl": b""}), ["ends too early"]
    yield "zip-only-stop", zip_bytes(entries | {"last/data.pkl": b"."}), ["left over"]
    yield "zip-no-network", torch_file(b"]"), ["contains no network but a value of type list"]
    yield "zip-empty-dict", torch_file(b"}"), ["an empty dict"]
    yield "zip-a-tensor", torch_file(tensor()), ["type Tensor"]


def _patched(content: bytes, entry: bytes, offset: int, value: int, form: str = "<L") -> bytes:
    """The zip with one field of an entry of its directory changed."""
    at = content.index(b"PK\x01\x02")
    while content[at + DIRECTORY.size :][: len(entry)] != entry:
        at = content.index(b"PK\x01\x02", at + 1)
    changed = bytearray(content)
    struct.pack_into(form, changed, at + offset, value)
    return bytes(changed)


def _record(name: bytes, content: bytes, offset: int) -> bytes:
    fields = (b"PK\x01\x02", 20, 20, 0, 0, 0, 0, zlib.crc32(content), len(content), len(content))
    return DIRECTORY.pack(*fields, len(name), 0, 0, 0, 0, 0, offset) + name


def _local(name: bytes, content: bytes) -> bytes:
    sizes = (len(content), len(content))
    return LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, 0, zlib.crc32(content), *sizes, len(name), 0) + name + content


def _closed(body: bytes, records: list[bytes]) -> bytes:
    directory = b"".join(records)
    count = min(len(records), 0xFFFF)
    wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, *[len(records)] * 2, len(directory), len(body))
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(body) + len(directory), 1)
    return body + directory + wide + locator + END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), len(body), 0)


def _overlapping(count: int) -> bytes:
    """Every entry contains all that follow, headers included."""
    body, records = _local(b"last/data/0", bytes(1 << 20)), []
    for index in range(1, count):
        body = LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 0, 0, 11, 0) + b"last/data/x" + body
        records.append((b"last/data/%d" % index, len(body)))
    return _closed(
        body,
        [_record(name, b"", len(body) - size) for name, size in records] + [_record(b"last/data.pkl", body[41:], 0)],
    )


def _same_entry_many_times(count: int) -> bytes:
    kernel = _local(b"last/data.pkl", bytes(1 << 20))
    return _closed(kernel, [_record(b"last/data/%d" % index, bytes(1 << 20), 0) for index in range(count)])


def _many_entries(count: int) -> bytes:
    names = [b"last/data/%d" % index for index in range(count)]
    locals_ = [_local(name, b"") for name in names]
    offsets = [0]
    for local in locals_:
        offsets.append(offsets[-1] + len(local))
    return _closed(
        b"".join(locals_), [_record(name, b"", offset) for name, offset in zip(names, offsets, strict=False)]
    )
