"""Scanned pictures and labels on disk, so that the next start reads one file instead of hundreds of thousands.

    head   magic, version, lengths, SHA-256 of all that follows
    body   JSON: paths | state of each picture and label file | the table of the scan

Never beside the data. A row counts only if path, size, mtime, ctime and inode of its picture and of its labels are
what they were; the other rows are scanned again. So a cache can be old or of another data set, and still not be wrong.
"""

import contextlib
import hashlib
import json
import logging
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.feed import default_folder as store_folder
from flatout.yolo.data.find import Pair
from flatout.yolo.data.scan import ScanConfig, ScanTable, join, scan, unpack

logger = logging.getLogger(__name__)

MAGIC = b"FLATOUTL"
VERSION = 3
HEAD = struct.Struct("<8sIqqq32s")
STATE_NUMBERS = 4
"""Per file: size, mtime, ctime (both in ns), inode; -1 for what is not there."""
UNSETTLED_S = 2.0
"""A file that changed this shortly before the scan may change again without its times telling; it is not trusted."""


class Cached(NamedTuple):
    """What a cache file holds."""

    pairs: list[Pair]
    state_N8: np.ndarray
    table: ScanTable


def default_folder() -> Path:
    """$XDG_CACHE_HOME/flatout/labels, or the same below ~/.cache."""
    return store_folder().parent / "labels"


def scan_cached(pairs: Sequence[Pair], config: ScanConfig, *, folder: Path | None, family: str = "") -> ScanTable:
    """As `scan`, reading only files that have changed; `folder` None means no cache.

    `family` says in words which data set this is, so that its next state replaces this one's cache; what is in the
    cache is compared with the files in any case.
    """
    if folder is None or not pairs:
        return scan(pairs, config)
    path = folder / f"{name_of(family, config)}.labels"
    begin_s = time.time()
    state_N8 = states(pairs)
    cached = load(path)
    row_N = _rows_still_true(cached, pairs, state_N8) if cached else np.full(len(pairs), -1)
    changed = np.flatnonzero(row_N < 0)
    if cached and np.array_equal(row_N, np.arange(len(cached.pairs))):
        return cached.table
    table = scan([pairs[row] for row in changed.tolist()], config)
    if cached and len(changed) < len(pairs):
        table = _merge(cached.table.take(row_N[row_N >= 0]), table, row_N >= 0)
    settled_N = np.all(state_N8[:, [1, 2, 5, 6]] < (begin_s - UNSETTLED_S) * 1e9, axis=1)
    save(path, Cached(list(pairs), np.where(settled_N[:, None], state_N8, -2), table))
    return table


def name_of(family: str, config: ScanConfig) -> str:
    """File name of a data set's cache: the same for the same words and the same way of reading."""
    words = repr((VERSION, config.strict, config.names, family, os.getcwd()))
    return hashlib.sha256(words.encode(errors="surrogateescape")).hexdigest()[:32]


def states(pairs: Sequence[Pair]) -> np.ndarray:
    """State of each picture and label file, int64 [N, 8]; nothing is opened."""
    return np.array([(*_state(pair.image), *_state(pair.label)) for pair in pairs], np.int64)


def load(path: Path) -> Cached | None:
    """The cache in a file; None, with a word in the log, if it is not one or not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        return _unpack(content)
    except (ValueError, struct.error) as error:
        logger.warning("The label cache %s cannot be used (%s). The data set is scanned anew.", path, error)
        return None


def save(path: Path, cached: Cached) -> None:
    """Write a cache under its name, whole or not at all; a folder that cannot be written to costs only time."""
    names = json.dumps([list(pair) for pair in cached.pairs]).encode()
    state, table = np.ascontiguousarray(cached.state_N8, "<i8").tobytes(), cached.table.pack()
    digest = hashlib.sha256(names + state + table).digest()
    head = HEAD.pack(MAGIC, VERSION, len(names), len(state), len(table), digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                file.writelines([head, names, state, table])
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise
    except OSError as error:
        logger.warning(
            "No label cache at %s (%s): every start will scan the whole data set. Set XDG_CACHE_HOME to a folder with "
            "room.",
            path.parent,
            error.strerror or error,
        )


def _unpack(content: bytes) -> Cached:
    magic, version, names_bytes, state_bytes, table_bytes, digest = HEAD.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        raise ValueError("it is of another kind or version")
    body = memoryview(content)[HEAD.size :]
    if len(body) != names_bytes + state_bytes + table_bytes or hashlib.sha256(body).digest() != digest:
        raise ValueError("it is damaged")
    pairs = [Pair(*pair) for pair in json.loads(bytes(body[:names_bytes]))]
    state_N8 = np.frombuffer(body[names_bytes : names_bytes + state_bytes], "<i8").reshape(-1, 2 * STATE_NUMBERS)
    table = unpack(body[names_bytes + state_bytes :])
    if not len(pairs) == len(state_N8) == len(table.picture_N):
        raise ValueError("its parts do not fit together")
    return Cached(pairs, state_N8, table)


def _rows_still_true(cached: Cached, pairs: Sequence[Pair], state_N8: np.ndarray) -> np.ndarray:
    """Row of each picture in the cache, int64 [N]; -1 where it is not there or its files have changed."""
    if cached.pairs == list(pairs):
        row_N = np.arange(len(pairs))
    else:
        rows = {pair: row for row, pair in enumerate(cached.pairs)}
        row_N = np.array([rows.get(pair, -1) for pair in pairs], np.int64)
    return np.where((cached.state_N8[row_N] == state_N8).all(1), row_N, -1)


def _merge(kept: ScanTable, scanned: ScanTable, kept_N: np.ndarray) -> ScanTable:
    """Both tables as one, in the order of the pictures."""
    order = np.argsort(np.argsort(~kept_N, kind="stable"), kind="stable")
    return join([kept, scanned]).take(order)


def _state(path: str) -> tuple[int, int, int, int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return -1, -1, -1, -1
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
