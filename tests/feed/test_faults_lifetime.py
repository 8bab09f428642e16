"""Feeds that are interrupted, abandoned, dropped or killed leave nothing behind, and can be started again."""

import functools
import gc
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from flatout.errors import ChildLostError, ConfigError, DataError
from flatout.feed import Feed, FeedConfig, Plan
from tests.feed.comparing import digest, digests
from tests.feed.injections import Script, children_of, forkserver_of, is_gone, open_files, run_script, wait_until
from tests.feed.sources import FailsToOpen, Images, ImportedModules, SlowToOpen, fail, lines_of, only_once

pytestmark = pytest.mark.fault

COUNT = 96
PLAN = Plan(num_samples=COUNT, batch_size=8, seed=5, shuffle=False)
BACKENDS = {
    "processes": {"workers": 2, "start_method": "fork"},
    "threads": {"workers": 2, "backend": "thread"},
    "inline": {"workers": 0},
}
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)

HEAD = """
import os, signal, sys, threading, time
from functools import partial
from pathlib import Path
from flatout.feed import Feed, FeedConfig, Field, Plan, SampleSource
from tests.feed.sources import Images, SlowToOpen, logged

def feed_of(faults=None, **knobs):
    source = Images(96, faults, sleep_s=0.001)
    return Feed(source, Plan(num_samples=96, batch_size=8, shuffle=False), FeedConfig(**{"workers": 2} | knobs))

def say(text):
    print(text, flush=True)
"""
FOR_EVER = """
if __name__ == "__main__":
    with feed_of(start_method=sys.argv[1]) as feed:
        while True:
            for batch in feed:
                if (batch.epoch, batch.step) == (1, 2):
                    say("running")
"""


@functools.cache
def undisturbed(epochs: int = 1) -> list[str]:
    with Feed(Images(COUNT), PLAN, FeedConfig(workers=0)) as feed:
        return [each for _ in range(epochs) for each in digests(feed)]


# The main process is interrupted or killed


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_ctrl_c_is_raised_once_and_ends_everything_without_other_messages(tmp_path: Path, start_method: str):
    with Script(HEAD + FOR_EVER, tmp_path, start_method) as script:
        assert script.wait_for_line() == "running"
        os.killpg(script.process.pid, signal.SIGINT)
        outcome = script.end()
        assert outcome.code == -signal.SIGINT
        assert outcome.err.count("Traceback") == 1, outcome
        assert outcome.err.rstrip().endswith("KeyboardInterrupt")
        script.wait_until_gone()


def test_signals_meant_for_the_trainer_end_no_worker(caplog):
    with Feed(Images(COUNT, sleep_s=0.001), PLAN, FeedConfig(workers=2, epochs=1)) as feed:
        before = feed.worker_pids
        seen = []
        for batch in feed:
            if batch.step < 3:
                for pid in [forkserver_of(feed), *before.values()]:
                    os.kill(pid, (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)[batch.step])
            seen.append(digest(batch))
        assert seen == undisturbed()
        assert feed.worker_pids == before
    assert not caplog.messages


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_nothing_outlives_a_main_process_that_is_killed(tmp_path: Path, start_method: str):
    with Script(HEAD + FOR_EVER, tmp_path, start_method) as script:
        assert script.wait_for_line() == "running"
        assert len(script.pids()) == 4
        # Memory without a name is freed with the last process.
        assert not [path for pid in script.pids() for path in open_files(pid) if path.startswith("/dev/shm")]
        script.process.kill()
        script.wait_until_gone()


IN_A_LONG_READ = """
if __name__ == "__main__":
    iter(feed := feed_of({0: partial(logged, Path(sys.argv[1]), partial(time.sleep, 30))}))
    time.sleep(60)
"""
WHILE_STARTING = """
if __name__ == "__main__":
    Feed(SlowToOpen(96, Path(sys.argv[1])), Plan(num_samples=96, batch_size=8), FeedConfig(workers=2)).start()
"""
WITH_ANOTHER_CHILD = """
if __name__ == "__main__":
    feed = feed_of({0: partial(logged, Path(sys.argv[1]), partial(time.sleep, 30))})
    feed.start()
    # Forked for other purposes, it holds copies of all pipes and sockets of the feed.
    if os.fork() == 0:
        time.sleep(60)
    iter(feed)
    time.sleep(60)
"""


@pytest.mark.parametrize("text", [IN_A_LONG_READ, WHILE_STARTING], ids=["in a long read", "while starting"])
def test_nothing_outlives_a_main_process_killed(tmp_path: Path, text: str):
    log = tmp_path / "log"
    with Script(HEAD + text, tmp_path, log) as script:
        wait_until(lambda: lines_of(log))
        script.process.kill()
        script.wait_until_gone()


def test_another_child_of_the_main_process_does_not_keep_workers_alive(tmp_path: Path):
    log = tmp_path / "log"
    with Script(HEAD + WITH_ANOTHER_CHILD, tmp_path, log) as script:
        wait_until(lambda: lines_of(log))
        script.process.kill()
        wait_until(lambda: len(script.pids()) == 1, timeout_s=5)


BY_EXIT = {
    "in mid-pass": "feed = feed_of(); batches = iter(feed); batch = next(batches)",
    "in the loop": "for batch in feed_of(): sys.exit(0)",
    "with threads": "feed = feed_of(backend='thread'); batches = iter(feed); batch = next(batches)",
}


@pytest.mark.parametrize("text", BY_EXIT.values(), ids=BY_EXIT)
def test_an_interpreter_that_ends_without_closing_leaves_nothing_and_prints_nothing(tmp_path: Path, text: str):
    outcome = run_script(f"{HEAD}\nif __name__ == '__main__':\n    {text}", tmp_path)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


# Passes that are abandoned or interrupted


@every_backend
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_an_abandoned_pass_does_not_spoil_the_next(backend: dict, kept: bool):
    passes = []
    with Feed(Images(COUNT), PLAN, FeedConfig(**backend)) as feed:
        for _ in range(6):  # more often than there are slots
            batches = feed.epoch(0)
            for batch in batches:
                if batch.step == 2:
                    break
            passes += [batches] * kept
        # Continue where the last pass was left, then from the start.
        assert digests(feed) == undisturbed()[3:]
        assert digests(feed.epoch(0)) == undisturbed()


@every_backend
def test_a_batch_stays_valid_after_a_break(backend: dict):
    with Feed(Images(COUNT), PLAN, FeedConfig(**backend)) as feed:
        batch = next(iter(feed))
        before = digest(batch)
        time.sleep(0.1)  # enough time for workers to overwrite it
        assert digest(batch) == before == undisturbed()[0]


@every_backend
def test_after_an_interrupt_inside_the_feed_it_can_be_iterated_again(backend: dict, tmp_path: Path):
    faults = {20: partial(only_once, tmp_path / "once", partial(fail, KeyboardInterrupt))}
    if backend["workers"]:
        # Interrupted while it waits: the worker continues with a slow sample.
        faults = {20: partial(only_once, tmp_path / "once", partial(time.sleep, 1))}
    with Feed(Images(COUNT, faults), PLAN, FeedConfig(**backend)) as feed:
        if backend["workers"]:
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            digests(feed)
        assert digests(feed.epoch(0)) == undisturbed()


@every_backend
def test_a_plan_that_fails_ahead_does_not_lead_to_stale_batches(backend: dict):
    def shapes(epoch: int, step: int) -> dict[str, tuple[int, ...]]:
        return {"image": (3, 4, 5)} if step == 6 else {}

    plan = Plan(num_samples=COUNT, batch_size=8, seed=5, shuffle=False, shapes=shapes)
    with Feed(Images(COUNT), plan, FeedConfig(**backend)) as feed:
        for start in (0, 0, 2):
            seen: list[str] = []
            with pytest.raises(DataError, match=r"'image' the shape \(3, 4, 5\).*at most \(3, 4, 4\)"):
                seen.extend(digest(batch) for batch in feed.epoch(0, start))
            assert seen == undisturbed()[start : start + len(seen)]
            assert len(seen) + start <= 6


def test_a_feed_can_be_closed_twice_and_started_again():
    feed = Feed(Images(COUNT), PLAN, FeedConfig(workers=2, start_method="fork"))
    first = digests(feed)
    feed.close()
    feed.close()
    assert first + digests(feed) == undisturbed(epochs=2)
    feed.close()


def test_a_dropped_feed_ends_its_processes_immediately():
    gc.disable()  # the collector would also end them, at some point
    try:
        feed = Feed(Images(COUNT), PLAN, FeedConfig(workers=2))
        digests(feed)
        next(iter(feed))
        pids = [forkserver_of(feed), *feed.worker_pids.values()]
        del feed
        wait_until(lambda: all(map(is_gone, pids)), timeout_s=2)
    finally:
        gc.enable()


def test_closing_a_feed_does_not_wait_for_another_that_was_forked_later():
    config = FeedConfig(workers=1, start_method="fork")
    with Feed(Images(COUNT), PLAN, config) as first, Feed(Images(COUNT), PLAN, config) as second:
        begin = time.monotonic()
        first.close()
        assert time.monotonic() - begin < 2
        assert digests(second) == undisturbed()


# Fifty epochs


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not persistent"])
def test_fifty_epochs_use_no_more_resources_than_five(persistent: bool):
    plan = Plan(num_samples=24, batch_size=8)
    me = psutil.Process()
    with Feed(Images(24), plan, FeedConfig(workers=2, persistent_workers=persistent)) as feed:
        used = []
        for epoch in range(50):
            assert sum(1 for _ in feed.epoch(epoch)) == 3
            feed.start()
            forkserver = forkserver_of(feed)
            processes = len(children_of(me.pid)), len(children_of(forkserver)), len(open_files(forkserver))
            used.append((me.memory_info().rss, me.num_fds(), feed.memory_bytes, *processes))
    rss, *counts = np.array(used).T
    assert np.ptp(rss[5:]) <= max(0.02 * rss[5], 2_000_000)
    for count in counts:
        assert np.ptp(count[5:]) == 0


# Processes that cannot be started


GUARDED = """
class Own(SampleSource):
    fields = {"x": Field(())}
    def __len__(self): return 16
    def sample(self, index, rng): return {"x": index}

def main():
    with Feed(Own(), Plan(num_samples=16, batch_size=4), FeedConfig(workers=2, start_method=sys.argv[1])) as feed:
        say(sorted(int(x) for batch in feed for x in batch["x"]) == list(range(16)))
"""


@pytest.mark.parametrize(("guard", "start_method"), [("if __name__ == '__main__':", "spawn"), ("if True:", "fork")])
def test_a_source_may_be_defined_in_a_script_with_a_guard_or_with_fork(tmp_path: Path, guard: str, start_method: str):
    outcome = run_script(f"{HEAD}\n{GUARDED}\n{guard}\n    main()", tmp_path, start_method)
    assert (outcome.code, outcome.out, outcome.err) == (0, "True\n", "")


def test_a_script_without_a_guard_raises_an_error_that_asks_for_one(tmp_path: Path):
    outcome = run_script(f"{HEAD}\n{GUARDED}\nmain()", tmp_path, "spawn")
    assert (outcome.code, outcome.out) == (1, "")
    last = outcome.err.rstrip().splitlines()[-1]
    assert last.startswith("flatout.errors.ConfigError: ")
    assert "`if __name__ == '__main__':`" in last


def test_a_source_that_cannot_be_pickled_raises_an_error_that_names_the_attribute(tmp_path: Path):
    source = Images(COUNT, {200: lambda: None})
    with pytest.raises(ConfigError, match=r"Images cannot be sent .* attribute 'faults' .*start_method='fork'"):
        Feed(source, PLAN, FeedConfig(workers=1)).start()
    with open(__file__) as handle:
        source = Images(COUNT)
        vars(source)["handle"] = handle
        with pytest.raises(ConfigError, match="attribute 'handle'"):
            Feed(source, PLAN, FeedConfig(workers=1)).start()
        with Feed(source, PLAN, FeedConfig(workers=1, start_method="fork", epochs=1)) as feed:
            assert digests(feed) == undisturbed()


def test_a_source_that_workers_cannot_load_raises_an_error_each_time(caplog):
    feed = Feed(FailsToOpen(COUNT, "no such disk " * 100_000), PLAN, FeedConfig(workers=1))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"cannot load FailsToOpen: RuntimeError: no such disk .*fork") as caught:
            feed.start()
        assert "in __setstate__" in str(caught.value.__cause__)
        assert len(str(caught.value)) < 1000
    assert not caplog.messages


def test_a_forkserver_killed_while_it_loads_the_source_is_replaced(tmp_path: Path, caplog):
    log = tmp_path / "log"
    source = SlowToOpen(COUNT, log, only_once=True)

    def kill_it() -> None:
        wait_until(lambda: lines_of(log))
        os.kill(int(lines_of(log)[0]), signal.SIGKILL)

    threading.Thread(target=kill_it).start()
    with Feed(source, PLAN, FeedConfig(workers=2, epochs=1)) as feed:
        assert digests(feed) == undisturbed()
    assert any("starting a new one" in text for text in caplog.messages)


def test_a_forkserver_that_is_killed_again_and_again_ends_the_run():
    def kill_it_every_epoch(feed: Feed) -> None:
        for _ in range(100):  # far more than four: on a busy machine not every epoch notices
            for batch in feed:
                if batch.step == 1 and feed.worker_pids:
                    os.kill(forkserver_of(feed), signal.SIGKILL)

    with Feed(Images(COUNT), PLAN, FeedConfig(workers=1, start_method="fork")) as feed:
        with pytest.raises(ChildLostError, match=r"died 4 times \(SIGKILL\)") as caught:
            kill_it_every_epoch(feed)
        assert caught.value.exit_code == 7


def test_more_workers_can_be_started_than_messages_fit_into_the_socket(monkeypatch):
    socketpair = socket.socketpair

    def narrow_socketpair(*args):
        pair = socketpair(*args)
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel rounds it up to a few messages
        return pair

    monkeypatch.setattr(socket, "socketpair", narrow_socketpair)
    with Feed(Images(COUNT), PLAN, FeedConfig(workers=24, epochs=1)) as feed:
        assert len(feed.worker_pids) == 24
        assert digests(feed) == undisturbed()


def test_workers_do_not_import_torch_although_the_trainer_does():
    import torch  # noqa: F401

    with Feed(ImportedModules(), Plan(num_samples=8, batch_size=8), FeedConfig(workers=1)) as feed:
        (batch,) = feed
        assert set(batch["pid"]) == set(feed.worker_pids.values())
        assert not batch["torch"].any()
