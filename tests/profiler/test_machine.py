"""Machine resources, read from small fake /proc and /sys trees: bare metal, nested containers, cgroup v1 and v2."""

import os
import resource
from pathlib import Path

import pytest

from flatout.clock import cgroup, machine

GIB = 2**30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:   1 kB\nMemAvailable:   33554432 kB\nHugePages_Total:       0\n"
V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_CPU = "33 32 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY = "34 32 0:30 {top} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
OTHERS = "22 27 0:21 / /proc rw - proc proc rw\n35 32 0:31 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write files below `root`, which then replaces "/"."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2_tree(root: Path, path: str, files: dict[str, str], top: str = "/") -> Path:
    """A machine with cgroup v2 only; `files` are relative to its mount point."""
    placed = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    own = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": OTHERS + V2.format(top=top)}
    return plant(root, own | placed)


def v1_tree(root: Path, path: str, files: dict[str, str], top: str = "/") -> Path:
    """A machine with cgroup v1 (and an empty v2 beside it, as in systemd's hybrid mode)."""
    placed = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    memberships = f"9:name=systemd:/\n5:memory:{path}\n4:cpu,cpuacct:{path}\n3:pids:/\n0::/\n"
    mounts = OTHERS + V1_CPU.format(top=top) + V1_MEMORY.format(top=top)
    mounts += "36 32 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    return plant(root, {"proc/self/cgroup": memberships, "proc/self/mountinfo": mounts} | placed)


# Cores


@pytest.mark.parametrize(
    ("facts", "usable"),
    [
        ((8, 8, None), 8),
        ((8, 3, None), 3),
        ((8, 8, 2.9), 2),
        ((8, 8, 0.5), 1),
        ((8, 8, 64.0), 8),
        ((64, 16, 20.0), 16),
        ((1, 1, None), 1),
    ],
)
def test_usable_cores_are_the_smallest_limit_but_at_least_one(facts: tuple[int, int, float | None], usable: int):
    assert machine.usable_cores(*facts) == usable


def test_v2_the_quota_of_the_process_s_own_cgroup_counts(tmp_path: Path):
    root = v2_tree(tmp_path, "/job", {"job/cpu.max": "150000 100000\n"})
    assert machine.cores(root).quota == 1.5


def test_v2_a_smaller_quota_of_a_parent_counts(tmp_path: Path):
    files = {
        "pod/cpu.max": "200000 100000\n",
        "pod/box/cpu.max": "max 100000\n",
        "pod/box/job/cpu.max": "800000 100000\n",
    }
    root = v2_tree(tmp_path, "/pod/box/job", files)
    assert machine.cores(root).quota == 2.0


def test_v2_in_a_cgroup_namespace_the_limits_are_at_the_mount_point(tmp_path: Path):
    assert machine.cores(v2_tree(tmp_path, "/", {"cpu.max": "50000 100000\n"})).quota == 0.5


@pytest.mark.parametrize("path", ["/../../other", "/somewhere/else"])
def test_a_path_outside_the_visible_part_falls_back_to_the_mount_point(tmp_path: Path, path: str):
    root = v2_tree(tmp_path, path, {"cpu.max": "300000 100000\n"}, top="/pod")
    assert machine.cores(root).quota == 3.0


def test_v1_quota_through_a_container_mount(tmp_path: Path):
    # Inside a container without namespaces: the path is that of the host's folder, but only that part is mounted.
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    }
    root = v1_tree(tmp_path, "/docker/abc/job", files, top="/docker/abc")
    assert machine.cores(root).quota == 4.0


def test_no_cgroup_files_mean_no_limits(tmp_path: Path):
    root = plant(tmp_path, {})
    assert machine.cores(root).quota is None
    assert machine.memory(root) == machine.Memory(64 * GIB, 32 * GIB, None, None, 32 * GIB)


def test_cores_of_this_process_follow_its_affinity():
    facts = machine.cores()
    assert facts.affinity == len(os.sched_getaffinity(0))
    assert 1 <= facts.usable <= facts.affinity <= facts.machine


def test_cores_without_affinity_support_count_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.cores(tmp_path) == machine.Cores(1, 1, None, 1)


# Memory


def test_v2_reclaimable_page_cache_does_not_count_as_used(tmp_path: Path):
    files = {
        "job/memory.max": f"{8 * GIB}\n",
        "job/memory.current": f"{6 * GIB}\n",
        "job/memory.stat": f"anon {GIB}\ninactive_file {5 * GIB}\n",
    }
    facts = machine.memory(v2_tree(tmp_path, "/job", files))
    assert (facts.cgroup_limit, facts.cgroup_used, facts.free) == (8 * GIB, GIB, 7 * GIB)


def test_v2_the_level_with_the_least_memory_left_counts(tmp_path: Path):
    files = {
        "pod/memory.max": f"{16 * GIB}\n",
        "pod/memory.current": f"{15 * GIB}\n",
        "pod/job/memory.max": f"{4 * GIB}\n",
        "pod/job/memory.current": "0\n",
    }
    facts = machine.memory(v2_tree(tmp_path, "/pod/job", files))
    assert (facts.cgroup_limit, facts.free) == (16 * GIB, GIB)


def test_a_limit_above_what_the_machine_has_free_changes_nothing(tmp_path: Path):
    files = {"job/memory.max": f"{512 * GIB}\n", "job/memory.current": "0\n"}
    assert machine.memory(v2_tree(tmp_path, "/job", files)).free == 32 * GIB


def test_free_memory_is_never_negative(tmp_path: Path):
    files = {"job/memory.max": "1000\n", "job/memory.current": "5000\n"}
    assert machine.memory(v2_tree(tmp_path, "/job", files)).free == 0


def test_v1_limit_and_use(tmp_path: Path):
    files = {
        "memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{GIB}\n",
        "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
    }
    facts = machine.memory(v1_tree(tmp_path, "/job", files))
    assert (facts.cgroup_limit, facts.cgroup_used) == (2 * GIB, GIB // 2)


def test_v1_unlimited_is_a_huge_number_and_means_no_limit(tmp_path: Path):
    files = {"memory/job/memory.limit_in_bytes": "9223372036854771712\n", "memory/job/memory.usage_in_bytes": "5\n"}
    assert machine.memory(v1_tree(tmp_path, "/job", files)).cgroup_limit is None


def test_v1_a_parent_outside_the_container_still_limits(tmp_path: Path):
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "0\n",
        "memory/memory.stat": f"hierarchical_memory_limit {3 * GIB}\n",
    }
    assert machine.memory(v1_tree(tmp_path, "/docker/abc", files, top="/docker/abc")).cgroup_limit == 3 * GIB


def test_without_proc_the_total_comes_from_posix(tmp_path: Path):
    facts = machine.memory(tmp_path)
    assert facts.total == facts.free == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Out-of-memory kills


def test_oom_kills_are_counted_in_the_process_s_own_cgroup_first(tmp_path: Path):
    files = {"job/memory.events": "low 0\noom 3\noom_kill 2\n", "memory.events": "oom_kill 9\n"}
    root = plant(v2_tree(tmp_path, "/job", files), {"proc/vmstat": "oom_kill 99\n"})
    assert machine.oom_kills(root=root) == 2


def test_oom_kills_v1(tmp_path: Path):
    files = {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"}
    assert machine.oom_kills(root=v1_tree(tmp_path, "/job", files)) == 4


def test_oom_kills_of_another_process_are_those_of_its_cgroup(tmp_path: Path):
    files = {"job/memory.events": "oom_kill 2\n", "child/memory.events": "oom_kill 7\n"}
    root = plant(v2_tree(tmp_path, "/job", files), {"proc/4711/cgroup": "0::/child\n"})
    assert machine.oom_kills(4711, root=root) == 7


def test_oom_kills_fall_back_to_the_whole_machine_and_then_to_none(tmp_path: Path):
    root = plant(tmp_path, {"proc/vmstat": "nr_free_pages 1\noom_kill 5\n"})
    assert machine.oom_kills(root=root) == 5
    (root / "proc/vmstat").unlink()
    assert machine.oom_kills(root=root) is None


# Shared memory, file descriptors, parsing


def test_shm_is_none_if_there_is_no_dev_shm(tmp_path: Path):
    assert machine.shm(tmp_path) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    facts = machine.shm(tmp_path)
    assert facts is not None
    assert 0 <= facts.free <= facts.size


def test_descriptors_count_the_files_that_are_open_now(tmp_path: Path):
    before = machine.descriptors()
    with (tmp_path / "a").open("w"), (tmp_path / "b").open("w"):
        assert machine.descriptors().open == before.open + 2
    assert machine.descriptors() == before
    assert before.soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_unlimited_descriptors_are_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert (machine.descriptors().soft, machine.descriptors().hard) == (1024, None)


def test_mount_points_with_spaces_are_read():
    (mount,) = cgroup.parse_mounts("1 2 0:3 / /my\\040cgroups rw shared:9 - cgroup2 none rw\n")
    assert mount == cgroup.Mount(frozenset(), "/", "/my cgroups")


def test_the_memory_of_the_real_machine_is_plausible():
    facts = machine.memory()
    assert 0 < facts.free <= facts.total


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        (
            "processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n\nprocessor : 1\nflags\t\t: fpu\n",
            {"fpu", "avx512f", "avx512_bf16"},
        ),
        ("processor : 0\nFeatures\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("processor : 0\n", set()),
    ],
)
def test_features_of_the_processor_are_those_of_its_first_core(tmp_path, cpuinfo, features):
    assert machine.cpu_features(plant(tmp_path, {"proc/cpuinfo": cpuinfo})) == features


def test_a_system_without_cpuinfo_names_no_features(tmp_path):
    assert machine.cpu_features(tmp_path) == set()
