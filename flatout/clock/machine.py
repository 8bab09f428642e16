"""Cores, memory, shared memory, file descriptors and packages that this process may use, and facts about processes.

Standard library only, so that workers and `--help` can use it. In a container the machine's own numbers are misleading:
the tightest of machine, CPU affinity and cgroup limit counts. `root` replaces "/" in tests.
"""

import os
import platform
import re
import resource
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from flatout.clock import cgroup

ROOT = Path("/")


@dataclass(frozen=True)
class Cores:
    """Logical cores; `quota` is in cores and may be fractional, None without a cgroup quota."""

    machine: int
    affinity: int
    quota: float | None
    usable: int
    """Basis of worker counts: the smallest of the three, with the quota rounded down; at least 1."""

    def __str__(self) -> str:
        quota = "no cgroup quota" if self.quota is None else f"cgroup quota {self.quota:g}"
        return f"{self.usable} usable: {self.machine} in the machine, {self.affinity} by affinity, {quota}"


@dataclass(frozen=True)
class Memory:
    """RAM in bytes. The cgroup values are those of the tightest level, None without a limit."""

    total: int
    available: int
    cgroup_limit: int | None
    cgroup_used: int | None
    """Excludes reclaimable page cache."""
    free: int
    """Memory that can still be used without swapping or being killed: the smaller of `available` and limit - used."""


@dataclass(frozen=True)
class Shm:
    """Size and free space of /dev/shm, bytes."""

    size: int
    free: int


@dataclass(frozen=True)
class Descriptors:
    """Limits on the open files of this process (None: unlimited), and how many it has open now."""

    soft: int | None
    hard: int | None
    open: int


def cores(root: Path = ROOT) -> Cores:
    """Cores of the machine, and how many of them this process may use."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    quota = cgroup.cpu_quota(cgroup.folders("cpu", root=root))
    return Cores(machine, affinity, quota, usable_cores(machine, affinity, quota))


def cpu_name(root: Path = ROOT) -> str:
    """The processor's model name; its architecture if the system does not report one."""
    return _of_processor(root, "model name") or platform.machine()


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Names of the instruction sets that the processor has, as Linux writes them; empty on other systems."""
    return frozenset(_of_processor(root, "flags", "Features").split())


def _of_processor(root: Path, *names: str) -> str:
    """What the system says about the first processor under one of these names; empty if nothing."""
    lines = (cgroup.system_text(root / "proc/cpuinfo") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def usable_cores(machine: int, affinity: int, quota: float | None) -> int:
    """The smallest of the three as an integer, at least 1."""
    whole_quota = machine if quota is None else int(quota)
    return max(1, min(machine, affinity, whole_quota))


def memory(root: Path = ROOT) -> Memory:
    """RAM of the machine, the cgroup limit, and the memory that is free under both."""
    total, available = _ram(root)
    use = cgroup.memory_use(cgroup.folders("memory", root=root))
    if use is None:
        return Memory(total, available, None, None, available)
    room = max(0, use.limit_bytes - use.used_bytes)
    return Memory(total, available, use.limit_bytes, use.used_bytes, min(available, room))


def shm(root: Path = ROOT) -> Shm | None:
    """Size and free space of /dev/shm; None if there is none."""
    try:
        usage = shutil.disk_usage(root / "dev/shm")
    except OSError:
        return None
    return Shm(usage.total, usage.free)


def descriptors() -> Descriptors:
    """Open-file limits of this process and the number of files it has open."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    # The listing itself opens one descriptor.
    return Descriptors(soft, hard, len(os.listdir("/dev/fd")) - 1)


def oom_kills(pid: int | None = None, root: Path = ROOT) -> int | None:
    """Number of OOM kills in the cgroup of `pid` (default: this process) or, if that is not counted, on the machine.

    Only an increase is meaningful: compare the values before and after a child's death. None if nothing counts them.
    """
    count = cgroup.oom_kills(cgroup.folders("memory", root=root, pid=pid))
    return cgroup.parse_stat(cgroup.system_text(root / "proc/vmstat")).get("oom_kill") if count is None else count


def package_version(name: str) -> str | None:
    """Installed version of a package from its metadata, without importing it; None: not installed."""
    from importlib import metadata  # takes 20 ms, which workers should not have to wait for

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def process_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process name; OSError if there is no such process, or no /proc."""
    # The name is in parentheses and may itself contain parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """Start time of a process in ticks since its host booted; OSError as for `process_fields`."""
    return int(process_fields(pid)[19])


def _ram(root: Path) -> tuple[int, int]:
    """Total and available bytes."""
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        nbytes = {words[0]: int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}
        return nbytes["MemTotal:"], nbytes["MemAvailable:"]
    except (OSError, KeyError):
        # No Linux /proc: POSIX only offers the total.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total


# Cores that other processes keep busy, which no remedy can give back


class OtherLoad:
    """Measures the load of other processes since it was created."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), _busy_s()

    def cores(self, own_cpu_s: float) -> float | None:
        """Average number of cores busy with other work; `own_cpu_s` is this training's CPU time. None: unknown."""
        began_s, busy_s = self._began
        now_busy_s = _busy_s()
        if busy_s is None or now_busy_s is None:
            return None
        return max(0.0, (now_busy_s - busy_s - own_cpu_s) / max(1e-3, time.perf_counter() - began_s))


def fitting_threads(num_threads: int, free_cores: float) -> int | None:
    """How many of `num_threads` threads have a free core; None if all do. One thread always counts as fitting."""
    if num_threads <= max(1.0, free_cores + 0.5):
        return None
    return max(1, int(free_cores + 0.25))


def busy_cores(*, glances: int = 5, pause_s: float = 0.01, root: Path = Path("/")) -> float:
    """Cores that other processes of the machine keep busy at the moment; 0 if the system does not report it.

    The smaller of two numbers: the threads that run or wait for a core now, and the load average of the last minute. A
    command that has just ended only appears in the second, and one that runs for an instant only in the first.
    """
    running = []
    for _ in range(glances):
        running.append(_num_running(root) - 1)
        time.sleep(pause_s)
    try:
        load = float((root / "proc/loadavg").read_text().split()[0])
    except (OSError, ValueError):
        return 0.0
    return max(0.0, min(load, statistics.median(running)))


def _num_running(root: Path) -> int:
    """Number of threads that run or wait for a core, this one included; 1 if the system does not report it."""
    found = re.search(r"^procs_running (\d+)", cgroup.system_text(root / "proc/stat") or "", re.MULTILINE)
    return int(found[1]) if found else 1


def _busy_s() -> float | None:
    """CPU seconds of all cores since boot, including time stolen by other guests; None if unknown."""
    if (text := cgroup.system_text(Path("/proc/stat"))) is None:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
