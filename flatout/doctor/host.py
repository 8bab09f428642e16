"""Is there enough of the machine: cores, memory, shared memory, descriptors, and the right Python packages?

Pure: facts in, findings out. The facts come from `flatout.clock.machine`.
"""

import os
import platform
import random
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from flatout import __version__
from flatout.clock import Cores, Descriptors, Memory, Shm
from flatout.findings import Finding, in_units

LOW_MEMORY_BYTES = 2 * 2**30
LOW_SHM_BYTES = 2**30
SPARE_DESCRIPTORS = 512
"""A worker holds a handful; a few dozen workers, caches and log files stay well below this."""


@dataclass(frozen=True)
class Software:
    """Versions; None: not installed."""

    python: str
    numpy: str | None
    flatout: str


def software() -> Software:
    """Versions, read from package metadata: nothing heavy is imported."""
    return Software(platform.python_version(), installed("numpy"), __version__)


def installed(package: str) -> str | None:
    """Installed version of a distribution, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_cores(cores: Cores) -> Finding:
    """Fewer cores than the machine has are no fault, but must not surprise anyone."""
    if cores.quota is not None and cores.quota < 1:
        advice = "less than one core: training will crawl; give the container more (docker run --cpus=4)"
        return Finding("cores", str(cores), "warn", advice)
    if cores.usable == 1:
        advice = "reading and training share one core; expect the loader to be the brake"
        return Finding("cores", str(cores), "warn", advice)
    if cores.usable < cores.machine:
        advice = f"worker counts start from {cores.usable}; for more raise the container's --cpus or the affinity"
        return Finding("cores", str(cores), "note", advice)
    return Finding("cores", str(cores), "ok", "worker counts start from this")


def check_memory(memory: Memory) -> Finding:
    """What is free decides the size of caches and rings."""
    limit = memory.cgroup_limit
    limited = limit is not None and limit < memory.total
    rule = f"cgroup limit {in_units(limit)}" if limit is not None and limited else "no cgroup limit"
    value = f"{in_units(memory.free)} free of {in_units(memory.total)}, {rule}"
    if memory.free < LOW_MEMORY_BYTES:
        return Finding("memory", value, "warn", "little for caches and rings: end other programs or raise the limit")
    if limited:
        return Finding("memory", value, "note", "beyond the limit the kernel kills, however much the machine has")
    return Finding("memory", value, "ok", "caches and rings are sized to what is free")


def check_shm(shm: Shm | None) -> Finding:
    """Rings live in anonymous shared memory, so a small /dev/shm hurts other programs more than flatout."""
    if shm is None:
        return Finding("/dev/shm", "absent", "note", "flatout does without; plain torch loaders with workers will not")
    value = f"{in_units(shm.free)} free of {in_units(shm.size)}"
    if shm.free < LOW_SHM_BYTES:
        advice = "small: plain torch loaders die of it (bus error); for them: docker run --shm-size=8g"
        return Finding("/dev/shm", value, "note", advice)
    return Finding("/dev/shm", value, "ok", "room for batches passed between processes")


def check_descriptors(files: Descriptors) -> Finding:
    """Workers, pipes and data files all take descriptors."""
    soft, hard = ("unlimited" if limit is None else str(limit) for limit in (files.soft, files.hard))
    value = f"{files.open} in use, limit {soft} (hard {hard})"
    if files.soft is not None and files.soft - files.open < SPARE_DESCRIPTORS:
        can_raise = files.hard is None or files.hard - files.open >= SPARE_DESCRIPTORS
        advice = "ulimit -n 4096" if files.hard is None or files.hard >= 4096 else f"ulimit -n {files.hard}"
        how = f"before training: {advice}" if can_raise else "ask the administrator to raise the hard limit to 4096"
        return Finding("open files", value, "warn", f"many workers will run out; {how}")
    return Finding("open files", value, "ok", "enough for workers, pipes and data files")


def check_software(versions: Software) -> list[Finding]:
    """Versions are named so that a report is complete; only an absent numpy is a fault."""
    if versions.numpy:
        numpy = Finding("numpy", versions.numpy, "ok", "every plan and every batch is made of its arrays")
    else:
        numpy = Finding("numpy", "not installed", "bad", "nothing works without it: python -m pip install numpy")
    return [
        Finding("flatout", versions.flatout, "ok", "the version to name in a bug report"),
        Finding("python", versions.python, "ok", "3.11 or newer, as flatout needs"),
        numpy,
    ]


# How fast does a folder's disk write, read, and open small files?
#
# Writes 64 MiB and 128 small files there, reads them back after asking the kernel to forget them, and leaves nothing
# behind. The page cache of a host outside this machine cannot be emptied from here: take the figures as upper bounds.

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


def check_disk(facts: DiskFacts | None) -> Finding:
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
        _drop_cached_pages(file.fileno())
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
                _drop_cached_pages(file.fileno())
        random.Random(0).shuffle(paths)
        start = time.perf_counter()
        for path in paths:
            path.read_bytes()
        return NUM_SMALL / (time.perf_counter() - start)


def _drop_cached_pages(descriptor: int) -> None:
    """Ask the kernel to drop the file's cached pages, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
