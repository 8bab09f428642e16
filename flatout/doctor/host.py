"""Is there enough of the machine: cores, memory, shared memory, descriptors, and the right Python packages?

Pure: facts in, findings out. The facts come from `flatout.profiler.machine`.
"""

import platform
from dataclasses import dataclass
from importlib import metadata

from flatout import __version__
from flatout.doctor.finding import Finding, in_units
from flatout.profiler.machine import Cores, Descriptors, Memory, Shm

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


def judge_cores(cores: Cores) -> Finding:
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


def judge_memory(memory: Memory) -> Finding:
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


def judge_shm(shm: Shm | None) -> Finding:
    """Rings live in anonymous shared memory, so a small /dev/shm hurts other programs more than flatout."""
    if shm is None:
        return Finding("/dev/shm", "absent", "note", "flatout does without; plain torch loaders with workers will not")
    value = f"{in_units(shm.free)} free of {in_units(shm.size)}"
    if shm.free < LOW_SHM_BYTES:
        advice = "small: plain torch loaders die of it (bus error); for them: docker run --shm-size=8g"
        return Finding("/dev/shm", value, "note", advice)
    return Finding("/dev/shm", value, "ok", "room for batches passed between processes")


def judge_descriptors(files: Descriptors) -> Finding:
    """Workers, pipes and data files all take descriptors."""
    soft, hard = ("unlimited" if limit is None else str(limit) for limit in (files.soft, files.hard))
    value = f"{files.open} in use, limit {soft} (hard {hard})"
    if files.soft is not None and files.soft - files.open < SPARE_DESCRIPTORS:
        can_raise = files.hard is None or files.hard - files.open >= SPARE_DESCRIPTORS
        advice = "ulimit -n 4096" if files.hard is None or files.hard >= 4096 else f"ulimit -n {files.hard}"
        how = f"before training: {advice}" if can_raise else "ask the administrator to raise the hard limit to 4096"
        return Finding("open files", value, "warn", f"many workers will run out; {how}")
    return Finding("open files", value, "ok", "enough for workers, pipes and data files")


def judge_software(versions: Software) -> list[Finding]:
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
