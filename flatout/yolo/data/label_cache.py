"""The label cache: scan results on disk, so that the next start reads one file instead of hundreds of thousands.

    head   magic, version, lengths, SHA-256 of the body
    body   paths as JSON | state of each image and label file | the scan table

The cache is never written beside the data. A row is valid only if path, size, mtime, ctime and inode of its image and
label file are unchanged; all other rows are scanned again. So an old cache, or one of another data set, does no harm.

Dimension key:  N images   8 = 2 files x STATE_NUMBERS
"""

import hashlib
import json
import logging
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flatout.errors import ResourceError
from flatout.feed import default_folder as store_folder
from flatout.safefiles import reason_of, write_file
from flatout.yolo.data.file_records import stat_of
from flatout.yolo.data.find import Pair
from flatout.yolo.data.scan import ScanConfig, ScanTable, join, scan, unpack

logger = logging.getLogger(__name__)

MAGIC = b"FLATOUTL"
VERSION = 4
HEAD = struct.Struct("<8sIqqq32s")
STATE_NUMBERS = 4
"""Numbers per file: size, mtime and ctime in ns, inode; all -1 for a file that does not exist."""
RECENT_S = 2.0
"""Files that changed less than this before the scan are not cached: they may change again within the clock's tick."""


class CachedScan(NamedTuple):
    """The content of a cache file."""

    pairs: list[Pair]
    state_N8: np.ndarray
    table: ScanTable


def default_folder() -> Path:
    """$XDG_CACHE_HOME/flatout/labels, or ~/.cache/flatout/labels."""
    return store_folder().parent / "labels"


def scan_cached(pairs: Sequence[Pair], config: ScanConfig, *, folder: Path | None, key: str = "") -> ScanTable:
    """Like `scan`, but reads only files that have changed; without a `folder` there is no cache.

    `key` identifies the data set, so that a later scan of it replaces this cache file. A wrong key costs only time,
    because every row is compared with its files.
    """
    if folder is None or not pairs:
        return scan(pairs, config)
    path = folder / f"{cache_name(key, config)}.labels"
    begin_s = time.time()
    state_N8 = file_states(pairs)
    cached = load(path)
    row_N = _valid_rows(cached, pairs, state_N8) if cached else np.full(len(pairs), -1)
    changed = np.flatnonzero(row_N < 0)
    if cached and np.array_equal(row_N, np.arange(len(cached.pairs))):
        return cached.table
    table = scan([pairs[row] for row in changed.tolist()], config)
    if cached and len(changed) < len(pairs):
        table = _merge(cached.table.take(row_N[row_N >= 0]), table, row_N >= 0)
    settled_N = np.all(state_N8[:, [1, 2, 5, 6]] < (begin_s - RECENT_S) * 1e9, axis=1)
    save(path, CachedScan(list(pairs), np.where(settled_N[:, None], state_N8, -2), table))
    return table


def cache_name(key: str, config: ScanConfig) -> str:
    """File name of a cache, which depends on the key, the working directory and how labels are read."""
    text = repr((VERSION, config.strict, config.names, key, os.getcwd(), *(["large"] if config.large else [])))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def file_states(pairs: Sequence[Pair]) -> np.ndarray:
    """State of each image and label file, int64 [N, 8]; no file is opened."""
    return np.array([(*_file_state(pair.image), *_file_state(pair.label)) for pair in pairs], np.int64)


def load(path: Path) -> CachedScan | None:
    """Read a cache file; None if it does not exist, or, with a warning, if it is damaged or of another version."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        return _unpack(content)
    except (ValueError, struct.error) as error:
        logger.warning("The label cache %s cannot be used: %s. The data set is scanned again.", path, error)
        return None


def save(path: Path, cached: CachedScan) -> None:
    """Write a cache file atomically; if that fails there is a warning, and the next start scans again."""
    names = json.dumps([list(pair) for pair in cached.pairs]).encode()
    state, table = np.ascontiguousarray(cached.state_N8, "<i8").tobytes(), cached.table.pack()
    digest = hashlib.sha256(names + state + table).digest()
    head = HEAD.pack(MAGIC, VERSION, len(names), len(state), len(table), digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, b"".join((head, names, state, table)))
    except (OSError, ResourceError) as error:
        logger.warning(
            "The label cache cannot be written to %s (%s), so every start will scan the whole data set. Set "
            "XDG_CACHE_HOME to a folder on a disk with free space.",
            path.parent,
            reason_of(error),
        )


def _unpack(content: bytes) -> CachedScan:
    magic, version, names_bytes, state_bytes, table_bytes, digest = HEAD.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        raise ValueError("it is another kind of file, or of another version")
    body = memoryview(content)[HEAD.size :]
    if len(body) != names_bytes + state_bytes + table_bytes or hashlib.sha256(body).digest() != digest:
        raise ValueError("it is damaged")
    pairs = [Pair(*pair) for pair in json.loads(bytes(body[:names_bytes]))]
    state_N8 = np.frombuffer(body[names_bytes : names_bytes + state_bytes], "<i8").reshape(-1, 2 * STATE_NUMBERS)
    table = unpack(body[names_bytes + state_bytes :])
    if not len(pairs) == len(state_N8) == len(table.image_N):
        raise ValueError("its parts have different lengths")
    return CachedScan(pairs, state_N8, table)


def _valid_rows(cached: CachedScan, pairs: Sequence[Pair], state_N8: np.ndarray) -> np.ndarray:
    """Row of each image in the cache, int64 [N]; -1 where there is none or the files have changed."""
    if cached.pairs == list(pairs):
        row_N = np.arange(len(pairs))
    else:
        rows = {pair: row for row, pair in enumerate(cached.pairs)}
        row_N = np.array([rows.get(pair, -1) for pair in pairs], np.int64)
    return np.where((cached.state_N8[row_N] == state_N8).all(1), row_N, -1)


def _merge(kept: ScanTable, scanned: ScanTable, kept_N: np.ndarray) -> ScanTable:
    """Both tables as one, in the order of the images."""
    order = np.argsort(np.argsort(~kept_N, kind="stable"), kind="stable")
    return join([kept, scanned]).take(order)


def _file_state(path: str) -> tuple[int, int, int, int]:
    if (status := stat_of(path)) is None:
        return -1, -1, -1, -1
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
