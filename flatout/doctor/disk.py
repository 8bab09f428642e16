"""How fast does a folder's disk write, read, and open small files?

Writes 64 MiB and 128 small files there, reads them back after asking the kernel to forget them, and leaves nothing
behind. The page cache of a host outside this machine cannot be emptied from here: take the figures as upper bounds.
"""

import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from flatout.doctor.finding import Finding

BIG_BYTES = 64 * 2**20
BLOCK_BYTES = 4 * 2**20
SMALL_BYTES = 64 * 2**10
"""A typical training JPEG."""
NUM_SMALL = 128

SLOW_READ_MB_S = 200
SLOW_SMALL_READS_S = 500
"""Below this one reader cannot keep one decoding core busy (about 500 JPEGs of 640x480 a second)."""


@dataclass(frozen=True)
class DiskFacts:
    """Speeds of one reader, in decimal MB/s and files/s; `error` is set when they could not be measured."""

    folder: str
    write_mb_s: float = 0.0
    read_mb_s: float = 0.0
    small_reads_s: float = 0.0
    error: str | None = None


def disk_facts(folder: Path) -> DiskFacts:
    """Measure a folder; a folder that is missing, read-only or full gives facts with an error."""
    try:
        write_mb_s, read_mb_s = _big_file(folder)
        return DiskFacts(str(folder), write_mb_s, read_mb_s, _small_files(folder))
    except OSError as error:
        return DiskFacts(str(folder), error=error.strerror or str(error))


def judge(facts: DiskFacts | None) -> Finding:
    """One finding; None stands for "not asked"."""
    if facts is None:
        return Finding("disk", "not measured", "note", "to measure where your data is: flatout doctor --disk FOLDER")
    if facts.error is not None:
        advice = "give a folder that exists, may be written to, and has 80 MB free"
        return Finding("disk", f"{facts.folder} cannot be measured: {facts.error}", "warn", advice)
    value = (
        f"{facts.folder}: write {facts.write_mb_s:,.0f} MB/s, read {facts.read_mb_s:,.0f} MB/s, "
        f"{facts.small_reads_s:,.0f} files of 64 KiB a second"
    )
    if facts.read_mb_s < SLOW_READ_MB_S or facts.small_reads_s < SLOW_SMALL_READS_S:
        return Finding("disk", value, "warn", "slow for training from files: copy the data to a local disk")
    return Finding("disk", value, "ok", "fast enough to feed decoding; these are figures of one reader")


def _big_file(folder: Path) -> tuple[float, float]:
    """Write and read speed, MB/s. The file has no name, so not even a crash leaves it behind."""
    block = os.urandom(BLOCK_BYTES)
    buffer = bytearray(BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(BIG_BYTES // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter()
        _forget(file.fileno())
        file.seek(0)
        begun = time.perf_counter()
        while file.readinto(buffer):
            pass
        return BIG_BYTES / 1e6 / (written - start), BIG_BYTES / 1e6 / (time.perf_counter() - begun)


def _small_files(folder: Path) -> float:
    """Files opened and read per second, in random order."""
    content = os.urandom(SMALL_BYTES)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".flatout-doctor-") as scratch:
        paths = [Path(scratch, str(number)) for number in range(NUM_SMALL)]
        for path in paths:
            with path.open("wb", buffering=0) as file:
                file.write(content)
                # Only pages already on the disk can be forgotten.
                os.fsync(file.fileno())
                _forget(file.fileno())
        random.Random(0).shuffle(paths)
        start = time.perf_counter()
        for path in paths:
            path.read_bytes()
        return NUM_SMALL / (time.perf_counter() - start)


def _forget(descriptor: int) -> None:
    """Ask the kernel to drop the file's cached pages, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
