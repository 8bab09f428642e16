"""Shortages: shared memory, memory, file descriptors, processes, room for ragged rows."""

import resource
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flatout.clock import machine
from flatout.errors import ResourceError
from flatout.feed import Feed, FeedConfig, Plan
from flatout.feed.ring import Arena
from tests.feed.comparing import digests
from tests.feed.injections import in_private_mounts, limited_cgroup, run_script
from tests.feed.sources import Crowds, Images, lines_of

pytestmark = pytest.mark.fault

HEAD = """
import logging, os, resource, sys
from pathlib import Path
import numpy as np
from flatout.errors import FlatoutError
from flatout.feed import Feed, FeedConfig, Field, Plan, Rows, SampleSource
logging.basicConfig(format="%(levelname)s %(message)s")

class Large(SampleSource):
    fields = {"image": Field((1 << 20,)), "rows": Rows(5)}
    def __init__(self, crowd): self.crowd = crowd
    def __len__(self): return 32
    def sample(self, index, rng):
        num_rows = self.crowd if index == 20 else index
        return {"image": np.full(1 << 20, index, np.uint8), "rows": np.ones((num_rows, 5))}

def check(batch):
    assert (batch["image"] == batch.indices[:, None]).all()
    assert (batch.counts["rows"] == batch.indices).all()

def run(batch_size, crowd=20, **knobs):
    plan = Plan(num_samples=32, batch_size=batch_size, shuffle=False)
    try:
        with Feed(Large(crowd), plan, FeedConfig(**{"workers": 2} | knobs)) as feed:
            for _ in range(2):
                for batch in feed:
                    check(batch)
                    yield batch
    except FlatoutError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)

def fill_shared_memory():
    # What another process might do: take all that is left.
    with open("/dev/shm/neighbour", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            print(error.strerror)
"""
TINY_SHM = "mount -t tmpfs -o size=8m tmpfs /dev/shm"


# Shared memory. The slots below take 16 MiB unless stated otherwise, /dev/shm has 8 MiB.


def test_slots_larger_than_dev_shm_work(tmp_path: Path):
    text = f"{HEAD}\nif __name__ == '__main__':\n    print(sum(1 for _ in run(4)))"
    outcome = run_script(text, tmp_path, prefix=in_private_mounts(TINY_SHM))
    assert (outcome.code, outcome.out, outcome.err) == (0, "16\n", "")


@pytest.mark.parametrize("preparation", ["os.memfd_create = refuse", "del os.memfd_create"], ids=["refused", "missing"])
def test_without_memfd_slots_that_do_not_fit_dev_shm_go_to_the_temporary_folder_with_one_warning(
    tmp_path: Path, preparation: str
):
    text = f"""{HEAD}
def refuse(name): raise PermissionError(1, "not permitted here")
if __name__ == '__main__':
    {preparation}
    print(sum(1 for _ in run(4)))"""
    outcome = run_script(text, tmp_path, prefix=in_private_mounts(TINY_SHM))
    assert (outcome.code, outcome.out) == (0, "16\n"), outcome
    (warning,) = outcome.err.splitlines()
    assert "go through a file in" in warning


@pytest.mark.parametrize("preparation", ["pass", "del os.memfd_create"], ids=["memfd", "dev shm"])
def test_another_process_that_fills_dev_shm_during_a_run_has_no_effect(tmp_path: Path, preparation: str):
    text = f"""{HEAD}
if __name__ == '__main__':
    {preparation}
    for batch in run(1, slots=4):
        if (batch.epoch, batch.step) == (0, 3):
            fill_shared_memory()
    print(batch.epoch, batch.step)"""
    outcome = run_script(text, tmp_path, prefix=in_private_mounts(TINY_SHM))
    assert (outcome.code, outcome.out, outcome.err) == (0, "No space left on device\n1 31\n", "")


@pytest.mark.parametrize("reserved", [True, False])
def test_only_reserved_memory_survives_another_process_that_fills_dev_shm_first(tmp_path: Path, reserved: bool):
    text = f"""{HEAD}
def truncate_only(fd, offset, length): os.ftruncate(fd, offset + length)
if __name__ == '__main__':
    del os.memfd_create
    if not {reserved}:
        os.posix_fallocate = truncate_only
    feed = Feed(Large(20), Plan(num_samples=32, batch_size=1), FeedConfig(workers=1, slots=4))
    feed.start()
    fill_shared_memory()
    for batch in feed:
        check(batch)"""
    outcome = run_script(text, tmp_path, prefix=in_private_mounts(TINY_SHM))
    assert (outcome.code == 0) == reserved, outcome
    # The process that accesses the missing page first, the main process or a worker, is killed by SIGBUS.
    assert (outcome.code == -signal.SIGBUS or "SIGBUS" in outcome.err) != reserved, outcome


def test_rows_that_do_not_fit_into_full_shared_memory_end_the_run_with_an_error_message(tmp_path: Path):
    text = f"""{HEAD}
if __name__ == '__main__':
    del os.memfd_create
    for batch in run(1, crowd=90_000, slots=4):
        if (batch.epoch, batch.step) == (0, 3):
            fill_shared_memory()"""
    outcome = run_script(text, tmp_path, prefix=in_private_mounts(TINY_SHM))
    assert outcome.code == 5, outcome
    assert "ResourceError: Shared memory ran out: 2 MiB more could not be reserved" in outcome.out


# Memory


def test_a_file_size_limit_that_is_too_small_for_shared_memory_is_named():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        arena = Arena.create(1 << 20)
        with pytest.raises(ResourceError, match=r"need 2\.0 MiB, .* files of up to 1\.0 MiB.*: ulimit -f unlimited"):
            arena.grow(1 << 20)
        with pytest.raises(ResourceError, match="ulimit -f unlimited"):
            Arena.create(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    arena.close()


def with_free_memory(monkeypatch, free: int) -> None:
    facts = machine.memory()
    monkeypatch.setattr("flatout.feed.runtime.machine.memory", lambda: replace(facts, free=free))


def test_slots_that_would_take_more_than_half_of_the_memory_are_reduced_with_a_warning(monkeypatch, caplog):
    source, plan = Images(96), Plan(num_samples=96, batch_size=8, seed=1)
    with Feed(source, plan, FeedConfig(workers=1, slots=40)) as feed:
        unlimited, expected = feed.memory_bytes, digests(feed)
    with_free_memory(monkeypatch, unlimited)
    with Feed(source, plan, FeedConfig(workers=1, slots=40)) as feed:
        assert feed.memory_bytes <= unlimited / 2 + 65536
        assert digests(feed) == expected
    (warning,) = caplog.messages
    assert "40 slots of 0 MiB would take more than half" in warning


def test_a_batch_that_cannot_fit_is_refused_with_the_numbers(monkeypatch):
    with_free_memory(monkeypatch, 100 << 20)
    plan = Plan(num_samples=1_000_000, batch_size=1_000_000)
    with pytest.raises(ResourceError, match=r"batch of 1000000 takes \d+ MiB, and at least 2 .*100 MiB free") as caught:
        Feed(Images(1_000_000), plan, FeedConfig(workers=1)).start()
    assert caught.value.exit_code == 5


def test_the_memory_limit_of_a_container_counts(tmp_path: Path):
    text = f"{HEAD}\nif __name__ == '__main__':\n    print(sum(1 for _ in run(32)))"
    limits = {"memory.limit_in_bytes": "100M", "memory.max": "100M"}
    with limited_cgroup("memory", limits) as prefix:
        outcome = run_script(text, tmp_path, prefix=prefix)
    assert outcome.code == 5, outcome
    assert (
        "ResourceError: A batch of 32 takes 32 MiB, and at least 2 batches must fit into half of the free memory"
        in outcome.out
    )


# File descriptors and processes


LIMIT_DESCRIPTORS = """
    limit = len(os.listdir("/dev/fd")) - 1 + int(sys.argv[1]) if sys.argv[1].startswith("+") else int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
"""


def test_too_few_descriptors_are_refused_with_the_needed_number(tmp_path: Path):
    text = f"{HEAD}\nif __name__ == '__main__':{LIMIT_DESCRIPTORS}    print(sum(1 for _ in run(4)))"
    outcome = run_script(text, tmp_path, "+12")
    assert outcome.code == 5, outcome
    assert "ResourceError: The feed needs 16 file descriptors, but only 12 of" in outcome.out
    assert "ulimit -n" in outcome.out


def test_sixty_four_descriptors_are_enough_for_many_workers_and_slots(tmp_path: Path):
    text = (
        f"{HEAD}\nif __name__ == '__main__':{LIMIT_DESCRIPTORS}    print(sum(1 for _ in run(1, workers=6, slots=40)))"
    )
    outcome = run_script(text, tmp_path, "64")
    assert (outcome.code, outcome.err) == (0, ""), outcome


def test_sixty_four_descriptors_are_enough_for_a_hundred_overflows(tmp_path: Path):
    text = f"""{HEAD}
if __name__ == '__main__':{LIMIT_DESCRIPTORS}
    from tests.feed.sources import Crowds
    source = Crowds(128, dict.fromkeys(range(128), 1000), Path(sys.argv[2]))
    with Feed(source, Plan(num_samples=128, batch_size=32), FeedConfig(workers=1, micro_batch=1, epochs=1)) as feed:
        print(sum(len(batch["rows"]) for batch in feed))"""
    outcome = run_script(text, tmp_path, "64", tmp_path / "log")
    assert (outcome.code, outcome.out) == (0, "128000\n"), outcome


@pytest.mark.parametrize(("room", "start_method"), [(0, "spawn"), (0, "fork"), (2, "spawn")])
def test_too_few_processes_are_refused_with_the_needed_number(tmp_path: Path, room: int, start_method: str):
    # Without the threads of a numerical library, which count towards the limit too.
    text = f"""import os
os.environ['OPENBLAS_NUM_THREADS'] = '1'
{HEAD}
if __name__ == '__main__':
    print(sum(1 for _ in run(4, workers=6, start_method='{start_method}')))"""
    with limited_cgroup("pids", {"pids.max": str(1 + room)}) as prefix:
        outcome = run_script(text, tmp_path, prefix=prefix)
    assert outcome.code == 5, outcome
    assert "The feed needs 7 processes: raise the limit (ulimit -u) or use fewer workers." in outcome.out


# Ragged rows


@pytest.mark.parametrize("knobs", [{"workers": 0}, {"workers": 2}, {"workers": 2, "backend": "thread"}])
def test_a_crowd_enlarges_the_slots_once_with_one_warning(tmp_path: Path, caplog, knobs: dict):
    crowd = 90_000
    source = Crowds(64, {13: crowd, 14: 1000}, tmp_path / "log")
    plan = Plan(num_samples=64, batch_size=8, seed=3)
    with Feed(source, plan, FeedConfig(**knobs)) as feed:
        for epoch in range(3):
            for batch in feed:
                assert np.array_equal(batch["rows"], np.concatenate([source.rows_of(i) for i in batch.indices]))
                assert batch.counts["rows"].tolist() == [len(source.rows_of(i)) for i in batch.indices]
            if epoch == 0:
                after_one = feed.memory_bytes
        assert feed.memory_bytes <= 4 * (crowd * 20) * 4
        assert feed.memory_bytes >= after_one
        feed.close()
    (warning,) = caplog.messages
    assert "1.8 MB of ragged rows" in warning
    assert "Rows(expected=...)" in warning
    # Epochs are read ahead, so the next one may have begun; but after the first, no sample is read twice per epoch.
    visits = Counter(map(int, lines_of(tmp_path / "log")))
    assert max(visits[index] for index in range(64) if index not in (13, 14)) <= 5
    assert visits[13] <= 1 + 4
