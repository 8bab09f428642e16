"""Facts and findings about cores, memory, shared memory, file descriptors, package versions and disk.

The `check_*` functions are pure: facts in, findings out. Facts about cores, memory and descriptors come from
`flatout.clock.machine`.
"""

import os
import platform
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from flatout import __version__
from flatout.clock import Cores, Descriptors, Memory, Shm, machine
from flatout.findings import Finding, in_units

LOW_MEMORY_BYTES = 2 * 2**30
LOW_SHM_BYTES = 2**30
SPARE_DESCRIPTORS = 512
"""A worker needs a handful; a few dozen workers, caches and log files stay well below this."""


@dataclass(frozen=True)
class Software:
    """Installed versions; None: not installed."""

    python: str
    numpy: str | None
    flatout: str


def software() -> Software:
    """Versions from package metadata, without importing the packages."""
    return Software(platform.python_version(), machine.package_version("numpy"), __version__)


def check_cores(cores: Cores) -> Finding:
    """Finding about usable cores: fewer than the machine has are not an error, but worth a note."""
    if cores.quota is not None and cores.quota < 1:
        advice = "less than one core: training will be very slow; give the container more (docker run --cpus=4)"
        return Finding("cores", str(cores), "warn", advice)
    if cores.usable == 1:
        advice = "loading and training share one core: expect loading to limit the speed"
        return Finding("cores", str(cores), "warn", advice)
    if cores.usable < cores.machine:
        advice = (
            f"the number of workers is based on {cores.usable}; for more, raise --cpus of the container or the affinity"
        )
        return Finding("cores", str(cores), "note", advice)
    return Finding("cores", str(cores), "ok", "the number of workers is based on this")


def check_memory(memory: Memory) -> Finding:
    """Finding about free memory and the limit of the cgroup; free memory decides the size of caches and buffers."""
    limit = memory.cgroup_limit
    limited = limit is not None and limit < memory.total
    rule = f"cgroup limit {in_units(limit)}" if limit is not None and limited else "no cgroup limit"
    value = f"{in_units(memory.free)} free of {in_units(memory.total)}, {rule}"
    if memory.free < LOW_MEMORY_BYTES:
        advice = "too little for caches and batch buffers: close other programs, or raise the limit"
        return Finding("memory", value, "warn", advice)
    if limited:
        return Finding("memory", value, "note", "the kernel kills processes above the limit, however much RAM is free")
    return Finding("memory", value, "ok", "caches and batch buffers are sized to what is free")


def check_shm(shm: Shm | None) -> Finding:
    """Finding about /dev/shm, which plain torch loaders need; flatout's rings use anonymous shared memory."""
    if shm is None:
        advice = "flatout works without it, plain torch loaders with workers do not"
        return Finding("/dev/shm", "absent", "note", advice)
    value = f"{in_units(shm.free)} free of {in_units(shm.size)}"
    if shm.free < LOW_SHM_BYTES:
        advice = "flatout does not need it, but plain torch loaders may crash (bus error): docker run --shm-size=8g"
        return Finding("/dev/shm", value, "note", advice)
    return Finding("/dev/shm", value, "ok", "enough for batches that plain torch loaders pass between processes")


def check_descriptors(files: Descriptors) -> Finding:
    """Finding about file descriptors, which workers, pipes and data files need."""
    soft, hard = ("unlimited" if limit is None else str(limit) for limit in (files.soft, files.hard))
    value = f"{files.open} in use, limit {soft} (hard {hard})"
    if files.soft is not None and files.soft - files.open < SPARE_DESCRIPTORS:
        can_raise = files.hard is None or files.hard - files.open >= SPARE_DESCRIPTORS
        advice = "ulimit -n 4096" if files.hard is None or files.hard >= 4096 else f"ulimit -n {files.hard}"
        how = (
            f"before training, run: {advice}" if can_raise else "ask the administrator to raise the hard limit to 4096"
        )
        return Finding("open files", value, "warn", f"too few for many workers; {how}")
    return Finding("open files", value, "ok", "enough for workers, pipes and data files")


def check_software(versions: Software) -> list[Finding]:
    """Findings about versions, listed for bug reports; only a missing numpy is an error."""
    if versions.numpy:
        numpy = Finding("numpy", versions.numpy, "ok", "all plans and batches are numpy arrays")
    else:
        numpy = Finding("numpy", "not installed", "bad", "flatout cannot work without it: python -m pip install numpy")
    return [
        Finding("flatout", versions.flatout, "ok", "please state this version in bug reports"),
        Finding("python", versions.python, "ok", "flatout needs 3.11 or newer"),
        numpy,
    ]


# Disk: speed of writing, of reading, and of opening small files
#
# Writes 64 MiB and 128 small files to a folder, reads them back after asking the kernel to drop them from its cache,
# and removes them. The page cache of the host of a virtual machine cannot be emptied: figures are upper bounds.

BIG_BYTES = 64 * 2**20
BLOCK_BYTES = 4 * 2**20
SMALL_BYTES = 64 * 2**10
"""A typical training JPEG."""
NUM_SMALL = 128

SLOW_READ_MB_S = 200
SLOW_SMALL_READS_S = 500
"""Below this one reader cannot keep one decoding core busy (about 500 JPEGs of 640x480 per second)."""


@dataclass(frozen=True)
class DiskFacts:
    """Speeds of one reader, in decimal MB/s and files/s; `error` is set if they could not be measured."""

    folder: str
    write_mb_s: float = 0.0
    read_mb_s: float = 0.0
    small_reads_s: float = 0.0
    error: str | None = None


def disk_facts(folder: Path) -> DiskFacts:
    """Measure the disk of a folder; a folder that is missing, read-only or full gives facts with an error."""
    try:
        write_mb_s, read_mb_s = _big_file(folder)
        return DiskFacts(str(folder), write_mb_s, read_mb_s, _small_files(folder))
    except OSError as error:
        return DiskFacts(str(folder), error=error.strerror or str(error))


def check_disk(facts: DiskFacts | None) -> Finding:
    """Finding about the disk; `facts` is None if it was not measured."""
    if facts is None:
        advice = "to measure the disk that holds your data: flatout doctor --disk FOLDER"
        return Finding("disk", "not measured", "note", advice)
    if facts.error is not None:
        advice = "name an existing, writable folder with 80 MB of free space"
        return Finding("disk", f"{facts.folder} cannot be measured: {facts.error}", "warn", advice)
    value = (
        f"{facts.folder}: write {facts.write_mb_s:,.0f} MB/s, read {facts.read_mb_s:,.0f} MB/s, "
        f"{facts.small_reads_s:,.0f} files of 64 KiB per second"
    )
    if facts.read_mb_s < SLOW_READ_MB_S or facts.small_reads_s < SLOW_SMALL_READS_S:
        return Finding("disk", value, "warn", "too slow for training from files: copy the data to a local disk")
    return Finding("disk", value, "ok", "fast enough for decoding; measured with one reader")


def _big_file(folder: Path) -> tuple[float, float]:
    """Write and read speed in MB/s. The file has no name, so it disappears even after a crash."""
    block = os.urandom(BLOCK_BYTES)
    buffer = bytearray(BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(BIG_BYTES // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter()
        # The next read comes from the disk, not from the cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.perf_counter()
        while file.readinto(buffer):
            pass
        return BIG_BYTES / 1e6 / (written - start), BIG_BYTES / 1e6 / (time.perf_counter() - begun)


def _small_files(folder: Path) -> float:
    """Number of files opened and read per second, in random order."""
    content = os.urandom(SMALL_BYTES)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".flatout-doctor-") as scratch:
        paths = [Path(scratch, str(number)) for number in range(NUM_SMALL)]
        for path in paths:
            with path.open("wb", buffering=0) as file:
                file.write(content)
                # Only pages that are on the disk can be dropped.
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        random.Random(0).shuffle(paths)
        start = time.perf_counter()
        for path in paths:
            path.read_bytes()
        return NUM_SMALL / (time.perf_counter() - start)
