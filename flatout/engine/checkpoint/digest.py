"""A SHA-256 of the whole file inside the file: every flipped bit is found, wherever it is.

    torch.save --> DigestSink --> zip ... end record | comment "flatout sha256 <64 hex digits>"

The checksums of a zip cover the content of its entries, not what lies around them. The digest stands in the comment
with which any zip may end, and covers every byte before it. Readers of zips, torch among them, skip comments.
"""

import hashlib
import os
from typing import BinaryIO, Protocol

from flatout.engine.checkpoint.file_bytes import read_at, read_into
from flatout.engine.checkpoint.refusal import AGAIN, Refusal

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
