"""Cores, memory, shared memory, descriptors and versions: the right level, and advice that can be followed."""

import pytest

from flatout.clock.machine import Cores, Descriptors, Memory, Shm
from flatout.doctor import host
from flatout.findings import Finding, in_units

GIB = 2**30


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (host.check_cores(Cores(16, 16, None, 16)), "ok", "number of workers"),
        (host.check_cores(Cores(64, 64, 8.5, 8)), "note", "based on 8"),
        (host.check_cores(Cores(64, 64, 0.5, 1)), "warn", "--cpus"),
        (host.check_cores(Cores(64, 1, None, 1)), "warn", "one core"),
        (host.check_memory(Memory(64 * GIB, 50 * GIB, None, None, 50 * GIB)), "ok", "sized to"),
        (host.check_memory(Memory(64 * GIB, 50 * GIB, 8 * GIB, GIB, 7 * GIB)), "note", "kills"),
        (host.check_memory(Memory(64 * GIB, 50 * GIB, 8 * GIB, 7 * GIB, GIB)), "warn", "limit"),
        (host.check_shm(Shm(32 * GIB, 31 * GIB)), "ok", "enough"),
        (host.check_shm(Shm(64 * 2**20, 64 * 2**20)), "note", "--shm-size=8g"),
        (host.check_shm(None), "note", "works without it"),
        (host.check_descriptors(Descriptors(1024, 4096, 10)), "ok", "enough"),
        (host.check_descriptors(Descriptors(None, None, 10)), "ok", "enough"),
        (host.check_descriptors(Descriptors(256, 65536, 10)), "warn", "ulimit -n 4096"),
        (host.check_descriptors(Descriptors(256, 1000, 10)), "warn", "ulimit -n 1000"),
        (host.check_descriptors(Descriptors(256, 256, 10)), "warn", "administrator"),
        (host.check_software(host.Software("3.12.1", None, "0.1.0"))[-1], "bad", "pip install numpy"),
    ],
)
def test_host_facts_lead_to_the_right_level_and_advice(finding: Finding, level: str, words: str):
    assert finding.level == level
    assert words in finding.advice


@pytest.mark.parametrize(("num_bytes", "text"), [(64 * 2**20, "64 MiB"), (int(23.54 * GIB), "23.5 GiB"), (0, "0 MiB")])
def test_sizes_read_well(num_bytes: int, text: str):
    assert in_units(num_bytes) == text
