"""Limits that control groups (v1 and v2) set for a process.

    /proc/<pid>/cgroup        path of the process in each hierarchy
    /proc/self/mountinfo      where each hierarchy is mounted, and which part of it
    cpu.max, memory.max, ...  the limits, one folder per level

A limit applies if any level sets it, from the process's own folder up to the mount point (for example a pod around a
container around a job), so the functions below look at all of these folders. `root` replaces "/" in tests, which build
a small tree elsewhere.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

UNLIMITED_BYTES = 1 << 60
"""v1 writes "no limit" as a number near 2**63, rounded to the page size: values from here on mean no limit."""


class Mount(NamedTuple):
    """One mounted hierarchy: its v1 controllers (empty for v2), the visible part of it, and the mount point."""

    controllers: frozenset[str]
    top: str
    point: str


class MemoryUse(NamedTuple):
    """Limit and use of the level with the least memory left; `used_bytes` excludes reclaimable page cache."""

    limit_bytes: int
    used_bytes: int


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The cgroup mounts listed in the text of /proc/self/mountinfo."""
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(kind[-1].split(",")) if kind[0] == "cgroup" else frozenset()
        # The kernel writes a space in a path as \040.
        mounts.append(Mount(controllers, fields[3].replace("\\040", " "), fields[4].replace("\\040", " ")))
    return mounts


def parse_memberships(cgroup: str) -> dict[str, str]:
    """Path of the process for each v1 controller, from the text of /proc/<pid>/cgroup; the v2 path has the key ""."""
    paths = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def levels(path: str, mount: Mount) -> list[PurePosixPath]:
    """Visible folders that contain a process at `path` of the hierarchy, innermost first, the mount point last."""
    point = PurePosixPath(mount.point)
    try:
        inside = PurePosixPath(path).relative_to(mount.top)
    except ValueError:
        inside = PurePosixPath()
    # A path that leaves the namespace (/../..) or is outside the mounted part is not a visible folder: then the mount
    # point is the nearest known ancestor.
    if ".." in inside.parts:
        inside = PurePosixPath()
    own = point / inside
    return [own, *(parent for parent in own.parents if parent.is_relative_to(point))]


def folders(controller: str, *, root: Path = Path("/"), pid: int | None = None) -> list[Path]:
    """Folders whose `cpu` or `memory` limits apply to a process (by default this one); empty without cgroups."""
    paths = parse_memberships(system_text(root / f"proc/{pid or 'self'}/cgroup") or "")
    found = []
    for mount in parse_mounts(system_text(root / "proc/self/mountinfo") or ""):
        key = controller if controller in mount.controllers else ""
        if key in paths and (key or not mount.controllers):
            found += [root / level.relative_to("/") for level in levels(paths[key], mount)]
    return found


def cpu_quota(cpu_folders: Iterable[Path]) -> float | None:
    """Smallest CPU quota, in cores (1.5 means 150 ms of CPU time per 100 ms); None without a quota."""
    return min((quota for folder in cpu_folders if (quota := _cpu_quota_of(folder)) is not None), default=None)


def memory_use(memory_folders: Iterable[Path]) -> MemoryUse | None:
    """Limit and use of the level with the least memory left; None if no level sets a limit."""
    uses = [use for folder in memory_folders if (use := _memory_use_of(folder)) is not None]
    return min(uses, key=lambda use: use.limit_bytes - use.used_bytes, default=None)


def oom_kills(memory_folders: Sequence[Path]) -> int | None:
    """Number of processes of this cgroup killed for lack of memory so far; None if the kernel does not count them."""
    for folder in memory_folders:
        for name in ("memory.events", "memory.oom_control"):
            count = parse_stat(system_text(folder / name)).get("oom_kill")
            if count is not None:
                return count
    return None


def parse_stat(text: str | None) -> dict[str, int]:
    """Values by name from `name value` lines, as in memory.stat, memory.events or /proc/vmstat."""
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _cpu_quota_of(folder: Path) -> float | None:
    v2 = system_text(folder / "cpu.max")
    quota, period = (
        v2.split() if v2 else (system_text(folder / "cpu.cfs_quota_us"), system_text(folder / "cpu.cfs_period_us"))
    )
    # "max" (v2) and -1 (v1) mean no quota.
    return int(quota) / int(period) if quota and period and quota.isdigit() and quota != "0" else None


def _memory_use_of(folder: Path) -> MemoryUse | None:
    limit = system_text(folder / "memory.max") or system_text(folder / "memory.limit_in_bytes")
    used = system_text(folder / "memory.current") or system_text(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    stat = parse_stat(system_text(folder / "memory.stat"))
    # v1 also reports the limits of parents that are not visible in a container.
    limit_bytes = min(
        int(limit) if limit.isdigit() else UNLIMITED_BYTES, stat.get("hierarchical_memory_limit", UNLIMITED_BYTES)
    )
    if limit_bytes >= UNLIMITED_BYTES:
        return None
    # total_inactive_file (v1) includes children, as the usage does; v2's inactive_file always does.
    reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return MemoryUse(limit_bytes, max(0, int(used) - reclaimable))


def system_text(path: Path) -> str | None:
    """The text of a file of the system; None if it is absent or unreadable, as if a controller is off at this level."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
