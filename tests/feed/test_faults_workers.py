"""Workers that are killed, stopped or out of memory: the batches stay the same."""

import contextlib
import functools
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.errors import ChildLostError
from flatout.feed import Feed, FeedConfig, Field, Plan, processes, supervisor
from flatout.feed.processes import PipedBackend
from flatout.feed.ring import UNKNOWN, Ring, RingSpec, Task
from tests.feed.comparing import digest, digests
from tests.feed.injections import (
    children_of,
    forkserver_of,
    forkservers_of,
    is_gone,
    is_stopped,
    limited_cgroup,
    run_script,
    wait_until,
)
from tests.feed.sources import (
    DiesAtStart,
    Fault,
    Images,
    die,
    lines_of,
    logged,
    only_once,
    stop_once,
    stop_with_lock_once,
    wait_for,
)

pytestmark = pytest.mark.fault

COUNT, BATCH = 96, 8
PLAN = Plan(num_samples=COUNT, batch_size=BATCH, seed=5, shuffle=False)
USUAL: dict[str, Any] = {"workers": 2, "epochs": 1, "start_method": "fork"}


@functools.cache
def undisturbed(epochs: int = 1, plan: Plan = PLAN) -> list[str]:
    with Feed(Images(plan.num_samples), plan, FeedConfig(workers=0)) as feed:
        return [each for _ in range(epochs) for each in digests(feed)]


def feed_with(faults: dict[int, Fault], **knobs: Any) -> Feed:
    return Feed(Images(COUNT, faults, sleep_s=0.001), PLAN, FeedConfig(**USUAL | knobs))


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_a_killed_worker_is_replaced_and_the_bytes_stay_the_same(tmp_path: Path, caplog, start_method: str):
    log, go = tmp_path / "log", tmp_path / "go"
    with feed_with({12: partial(logged, log, partial(wait_for, go))}, start_method=start_method, epochs=1000) as feed:
        batches = iter(feed)
        wait_until(lambda: lines_of(log))
        before = feed.worker_pids
        victim = int(lines_of(log)[0])
        go.touch()
        os.kill(victim, signal.SIGKILL)
        assert digests(batches) == undisturbed()
        assert victim in before.values()
        assert victim not in feed.worker_pids.values()
        # On a busy machine the other worker may have read the whole pass before the new one reports its start.
        wait_until(lambda: len(feed.worker_pids) == 2 or not digests(feed))
    warning = next(text for text in caplog.messages if "died" in text)
    assert "SIGKILL" in warning
    assert "sample 12 (images/0012.png)" in warning


@pytest.mark.parametrize("seed", range(5))
def test_workers_killed_at_random_times_change_no_byte(monkeypatch, seed: int):
    monkeypatch.setattr(supervisor, "STRIKES", 100)  # three of these kills can hit one sample by chance
    random_ = random.Random(seed)
    with Feed(
        Images(COUNT, sleep_s=0.001), PLAN, FeedConfig(workers=3, epochs=3, micro_batch=2, start_method="fork")
    ) as feed:
        over = threading.Event()

        def kill_now_and_then() -> None:
            for _ in range(15):
                if over.wait(random_.uniform(0.005, 0.05)):
                    return
                if pids := list(feed.worker_pids.values()):
                    kill(random_.choice(pids))

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        try:
            seen = [digest(batch) for _ in range(3) for batch in feed]
        finally:
            over.set()
            killer.join()
    assert seen == undisturbed(epochs=3)


def test_a_worker_killed_by_a_signal_without_a_name_is_replaced(caplog):
    with feed_with({}) as feed:
        batches = iter(feed)
        os.kill(feed.worker_pids[0], signal.SIGRTMIN + 5)
        assert digests(batches) == undisturbed()
    assert any(f"died: signal {signal.SIGRTMIN + 5}" in text for text in caplog.messages)


@pytest.mark.parametrize("with_forkserver", [False, True], ids=["workers", "workers and forkserver"])
def test_all_workers_killed_at_once_are_replaced(with_forkserver: bool):
    with Feed(Images(COUNT, sleep_s=0.002), PLAN, FeedConfig(workers=3, epochs=1)) as feed:
        seen = []
        for batch in feed:
            if batch.step == 3:
                forkserver, before = forkserver_of(feed), feed.worker_pids
                for pid in [*before.values(), *([forkserver] if with_forkserver else [])]:
                    kill(pid)
            seen.append(digest(batch))
        assert seen == undisturbed()
        assert len(feed.worker_pids) == 3
        assert not set(before.values()) & set(feed.worker_pids.values())


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_a_killed_forkserver_is_replaced_with_its_workers(tmp_path: Path, caplog, start_method: str):
    # A feed that has read everything would not notice: the last sample waits until the forkserver died twice.
    go = tmp_path / "go"
    with feed_with({COUNT - 1: partial(wait_for, go)}, start_method=start_method) as feed:
        first: set[int] = set()

        def workers_after_the_first() -> set[int]:
            return set(feed.worker_pids.values()) - first

        def kill_the_second() -> None:
            wait_until(lambda: len(workers_after_the_first()) == len(first))
            others = workers_after_the_first()
            kill(forkserver_of(feed))
            # Only their successors may finish.
            wait_until(lambda: all(map(is_gone, others)))
            go.touch()

        killer, seen = threading.Thread(target=kill_the_second), []
        for batch in feed:
            if batch.step == 1:
                first |= set(feed.worker_pids.values())
                kill(forkserver_of(feed))
                killer.start()
            seen.append(digest(batch))
        killer.join()
        assert seen == undisturbed()
    assert sum("which starts its workers, died (SIGKILL)" in text for text in caplog.messages) == 2


def test_a_forkserver_that_is_killed_again_and_again_raises_an_error_with_advice():
    def read_and_kill() -> None:
        with feed_with({}) as feed:
            while True:
                for _ in feed.epoch(0):
                    for forkserver in forkservers_of(feed):
                        kill(forkserver)

    with pytest.raises(ChildLostError, match=r"died 4 times \(SIGKILL\)\. .*\(dmesg\), and use fewer workers"):
        read_and_kill()


def test_any_number_of_deaths_is_survived_as_long_as_tasks_are_finished_in_between(tmp_path: Path):
    # Every second sample kills a worker, once, and all of them are in one batch.
    faults = {index: partial(only_once, tmp_path / str(index), die) for index in range(0, 40, 2)}
    plan = Plan(num_samples=40, batch_size=40, seed=5, shuffle=False)
    with Feed(Images(40, faults), plan, FeedConfig(**USUAL | {"workers": 1, "micro_batch": 1})) as feed:
        assert digests(feed) == undisturbed(plan=plan)


def test_a_worker_that_dies_while_the_others_are_starting_is_replaced_once(tmp_path: Path):
    with Feed(DiesAtStart(COUNT, tmp_path / "marker"), PLAN, FeedConfig(workers=3, epochs=1)) as feed:
        assert digests(feed) == undisturbed()
        assert len(feed.worker_pids) == 3
        assert len(children_of(forkserver_of(feed))) == 3


def test_the_comparison_detects_a_source_that_depends_on_its_worker(tmp_path: Path):
    class Impure(Images):
        def sample(self, index, rng):
            values = super().sample(index, rng)
            return values if index != 12 else values | {"image": values["image"] ^ np.uint8(os.getpid() % 251)}

    config = FeedConfig(workers=1, epochs=1, start_method="fork")
    with Feed(Impure(COUNT), PLAN, config) as first, Feed(Impure(COUNT), PLAN, config) as second:
        assert [step for step, (a, b) in enumerate(zip(first, second, strict=True)) if digest(a) != digest(b)] == [1]


@pytest.mark.parametrize("announced_again", [True, False])
def test_a_token_lost_with_a_dying_worker_strands_no_task_if_tasks_are_announced_again(
    tmp_path: Path, monkeypatch, announced_again: bool
):
    if not announced_again:
        monkeypatch.setattr(PipedBackend, "announce_again", lambda backend, num_unclaimed: None)
    go = tmp_path / "go"
    # Both workers are blocked in their first sample while one token is removed, as by a worker that dies between
    # reading it and claiming a task.
    with feed_with({0: partial(wait_for, go), 1: partial(wait_for, go)}, micro_batch=1) as feed:
        batches = iter(feed)
        backend: Any = feed._started.backend
        os.read(backend._token_readers[0], 1)
        go.touch()
        seen: list[str] = []
        waiting = threading.Thread(target=lambda: seen.extend(digests(batches)), daemon=True)
        waiting.start()
        waiting.join(timeout=10 if announced_again else 2)
        assert waiting.is_alive() != announced_again
        backend.announce(1)
        waiting.join(timeout=10)
    assert seen == undisturbed()


def test_a_claim_interrupted_by_death_belongs_to_the_next_worker_that_claims():
    spec = RingSpec(fields={"x": Field(())}, batch_size=4, micro_batch=2, num_slots=2, num_workers=2, num_items=8)
    ring = Ring.create(spec, shared_by_processes=False)
    (ticket, _) = ring.publish([Task(0, 0, 2), Task(0, 2, 4)])
    ring._cells[0] = (ticket, time.monotonic_ns(), UNKNOWN)  # worker 0 dies here, before it advances the queue
    assert ring.claim_of(0) is None
    assert ring.claim(1) == (ticket, Task(0, 0, 2))
    assert ring.claim_of(0) is None
    assert ring.claim_of(1).ticket == ticket
    ring.close()


@pytest.mark.parametrize("moment", ["at a sample", "at any time"])
def test_a_stopped_worker_is_killed_and_replaced_by_the_watchdog(tmp_path: Path, caplog, moment: str):
    log = tmp_path / "log"
    faults: dict[int, Fault] = {10: partial(stop_once, log)} if moment == "at a sample" else {}
    with feed_with(faults, watchdog_s=0.6) as feed:
        batches = iter(feed)
        if moment == "at any time":
            victim = feed.worker_pids[0]
            os.kill(victim, signal.SIGSTOP)
        assert digests(batches) == undisturbed()
        if moment == "at a sample":
            assert int(lines_of(log)[0]) not in feed.worker_pids.values()
            assert any("hangs" in text and "sample 10 (images/0010.png)" in text for text in caplog.messages)


def test_without_the_watchdog_a_stopped_worker_blocks_its_batch(tmp_path: Path):
    log = tmp_path / "log"
    with feed_with({10: partial(stop_once, log)}, watchdog_s=0) as feed:
        batches = iter(feed)
        wait_until(lambda: lines_of(log) and is_stopped(int(lines_of(log)[0])))
        seen: list[str] = []
        waiting = threading.Thread(target=lambda: seen.extend(digests(batches)))
        waiting.start()
        waiting.join(timeout=2)
        assert waiting.is_alive()
        os.kill(int(lines_of(log)[0]), signal.SIGCONT)
        waiting.join(timeout=10)
    assert seen == undisturbed()


def test_a_worker_stopped_while_it_holds_the_lock_of_the_ring_does_not_stop_the_feed(tmp_path: Path):
    log = tmp_path / "log"
    with feed_with({10: partial(stop_with_lock_once, log)}, start_method="spawn") as feed:
        assert digests(feed) == undisturbed()
        assert int(lines_of(log)[0]) not in feed.worker_pids.values()


def test_workers_that_were_paused_together_with_their_owner_are_not_killed_immediately(tmp_path: Path, caplog):
    go = tmp_path / "go"
    with feed_with({10: partial(wait_for, go)}, watchdog_s=0.8) as feed:
        batches = iter(feed)
        before = feed.worker_pids
        first_slot, _ = feed._started.stream._in_flight[0]
        wait_until(lambda: feed._started.ring.slots[first_slot].is_complete)
        for pid in before.values():
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1)
        go.touch()
        for pid in before.values():
            os.kill(pid, signal.SIGCONT)
        assert digests(batches) == undisturbed()
        assert feed.worker_pids == before
    assert not any("hangs" in text for text in caplog.messages)


def test_a_stopped_idle_worker_does_not_delay_the_end_of_an_epoch(monkeypatch, caplog):
    monkeypatch.setattr(processes, "END_TIMEOUT_S", 0.5)
    config = FeedConfig(workers=2, persistent_workers=False, start_method="fork")
    with Feed(Images(COUNT), PLAN, config) as feed:
        batches = iter(feed)
        seen = [digest(next(batches)) for _ in range(len(feed) - 1)]
        time.sleep(0.3)  # the last batch is complete
        os.kill(feed.worker_pids[1], signal.SIGSTOP)
        seen.append(digest(next(batches)))
        assert next(batches, None) is None
        seen += digests(feed)
    assert seen == undisturbed(epochs=2)
    assert not caplog.messages


OUT_OF_MEMORY = """
import logging, sys
from functools import partial
from pathlib import Path
from flatout.feed import Feed, FeedConfig, Plan
from tests.feed.comparing import digests
from tests.feed.sources import Images, take_memory

if __name__ == "__main__":
    logging.basicConfig()
    source = Images(96, {12: partial(take_memory, Path(sys.argv[1]), 600_000_000)})
    plan = Plan(num_samples=96, batch_size=8, seed=5, shuffle=False)
    with Feed(source, plan, FeedConfig(workers=2, epochs=1)) as feed:
        print(*digests(feed))
"""


def test_a_worker_killed_for_lack_of_memory_is_replaced_with_advice(tmp_path: Path):
    limits = {"memory.limit_in_bytes": "300M", "memory.max": "300M", "memory.swap.max": "0"}
    with limited_cgroup("memory", limits) as prefix:
        outcome = run_script(OUT_OF_MEMORY, tmp_path, tmp_path / "marker", prefix=prefix)
    assert outcome.code == 0, outcome
    assert outcome.out.split() == undisturbed()
    assert "out of memory: use fewer workers (--workers 1)" in outcome.err
    assert "sample 12 (images/0012.png)" in outcome.err


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
