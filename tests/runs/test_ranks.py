"""G6, F29, F32: ranks see the samples that one would see, their number may change, and they end together."""

import json
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from flatout.errors import Interrupted
from flatout.ranks.watch import GRACE_S, LEFT, PERIOD_S, Heartbeats, RankWatch, kill_process, process_start_ticks
from flatout.ranks.watch import LOST_AFTER_S as LOST_AFTER_S_BY_DEFAULT
from flatout.ranks.world import World, process_group
from flatout.safefiles.container import read_container
from tests.runs.comparing_states import rows_of
from tests.runs.toy_job import BATCH
from tests.runs.toy_ranks import run_ranks, samples_of, seen_by, start_ranks
from tests.runs.toy_runs import ToyRun, Toys

LOUD = {"TOY_LOG": "DEBUG"}
SLOWLY = ("--delay-ms", 50)
LOST_AFTER_S = 4
"""Eight heartbeats: on a busy machine, fewer might be missed by accident."""


def test_two_ranks_see_together_what_one_sees_alone(toys: Toys, tmp_path: Path):
    """G6: the same samples in every step, and the same weights on both ranks; not the same bits as alone."""
    alone = samples_of(toys.run(tmp_path / "alone", "--epochs", 2, env=LOUD).output)
    runs = run_ranks(toys, tmp_path / "together", "--epochs", 2)
    assert seen_by(runs) == alone
    assert len({re.search(r"^weights \w+$", run.output, re.MULTILINE)[0] for run in runs}) == 1  # type: ignore[index]


def test_ranks_that_do_not_share_the_samples_are_detected(toys: Toys, tmp_path: Path):
    """Negative control of G6."""
    alone = samples_of(toys.run(tmp_path / "alone", "--epochs", 1, env=LOUD).output)
    seen = seen_by(run_ranks(toys, tmp_path / "together", "--epochs", 1, "--unshared"))
    assert seen.keys() == alone.keys()
    assert all(seen[position] != alone[position] for position in alone)


def test_a_run_continues_with_more_ranks_and_with_fewer(toys: Toys, tmp_path: Path):
    """G6, F32: 1 -> 2 -> 1 rank; every step has the same samples."""
    whole = samples_of(toys.run(tmp_path / "whole", env=LOUD).output)
    first = toys.run(tmp_path / "parts", env=LOUD | {"FLATOUT_STOP_AFTER": "12"})
    second = run_ranks(toys, tmp_path / "parts", env={"FLATOUT_STOP_AFTER": "10"})
    third = toys.run(tmp_path / "parts", env=LOUD)
    assert "world_size 1 -> 2: samples and their order per step stay the same" in second[0].output
    assert "world_size 2 -> 1" in third.output
    assert third.code == 0, third.output
    assert samples_of(first.output) | seen_by(second) | samples_of(third.output) == whole
    assert len(rows_of(tmp_path / "parts/toy/log.jsonl")) == 4


def test_only_the_first_of_several_ranks_profiles_itself(toys: Toys, tmp_path: Path):
    """The others would read and write its files; images are those of all ranks."""
    first, second = run_ranks(toys, tmp_path, "--profile", 3)
    assert f"3 steps of {BATCH} images: " in first.printed
    assert "ms per step" not in second.printed


# F29: one of two ranks is lost.


def ended_together(runs: list[ToyRun]) -> None:
    """Wait for all runs, at most the minute that is promised."""
    end_s = time.monotonic() + 60
    for run in runs:
        run.wait(end_s - time.monotonic())


def last_message(run: ToyRun) -> str:
    """The last message of flatout; torch may print others at any time."""
    return re.findall(r"^flatout: .*$", run.output, re.MULTILINE)[-1]


def checkpoint_is_sound(project: Path) -> None:
    assert "training" in read_container(project / "toy/weights/last.pt")


@pytest.mark.fault
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_when_a_rank_is_killed_or_stopped_the_others_end_and_say_so(
    number: signal.Signals, lost: int, toys: Toys, tmp_path: Path
):
    runs = start_ranks(
        toys, tmp_path, "--epochs", 200, "--save-every-steps", 2, "--lost-after-s", LOST_AFTER_S, *SLOWLY
    )
    runs[0].wait_for_words("epoch 1 step 6")
    runs[lost].send(number)
    ended_together(runs)
    survivor = runs[1 - lost]
    assert (runs[lost].code, survivor.code) == (-signal.SIGKILL, 7), survivor.output
    message = rf"flatout: no heartbeat from rank {lost} \(.+\): .* Run the same command again to continue\."
    assert re.fullmatch(message, last_message(survivor)), survivor.output
    checkpoint_is_sound(tmp_path)


@pytest.mark.fault
@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_one_rank_is_reported_to_the_others_with_its_traceback(failing: int, toys: Toys, tmp_path: Path):
    """Also that of the first rank, whose end takes the store with it."""
    runs = start_ranks(toys, tmp_path, "--save-every-steps", 2, each={failing: ("--no-memory", "2:3")})
    ended_together(runs)
    other = runs[1 - failing]
    assert (runs[failing].code, other.code) == (5, 7), other.output
    assert f"Rank {failing} (" in other.output and "torch.OutOfMemoryError: CUDA out of memory" in other.output
    message = f"flatout: rank {failing} failed, so all ranks end: ResourceError: out of GPU memory"
    assert last_message(other).startswith(message), other.output
    checkpoint_is_sound(tmp_path)


def test_all_ranks_end_within_a_minute_by_default():
    """F29; the tests above use a shorter limit. After it is noticed, a launcher gives the others half a minute."""
    torchrun_waits_s = 30
    assert LOST_AFTER_S_BY_DEFAULT + max(GRACE_S, torchrun_waits_s) < 60


# Heartbeats, without processes.


def test_a_rank_is_lost_when_it_is_silent_for_too_long_unless_it_has_left():
    heartbeats = Heartbeats(3, now_s=0.0)
    for second in range(1, 12):
        heartbeats.update([second, min(second, 4), LEFT], float(second))
        lost = heartbeats.silent(float(second), limit_s=5)
        assert lost == ([1] if second > 9 else []), second


def test_a_process_that_was_stopped_itself_reports_no_other_as_lost():
    """Ctrl-Z stops all ranks at once; after `fg` they continue."""
    heartbeats = Heartbeats(2, now_s=0.0)
    heartbeats.update([1, 1], 1.0)
    assert heartbeats.silent(1.0, limit_s=5) == []
    assert heartbeats.silent(1000.0, limit_s=5) == []
    assert heartbeats.silent(1000.0 + PERIOD_S, limit_s=5) == []
    heartbeats.update([2, 1], 1004.0)
    assert heartbeats.silent(1004.0, limit_s=3.9) == [1], "but later it may"


class SlowStore(dict[str, str]):
    """A store that blocks heartbeats until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.sending, self.gate = threading.Event(), threading.Event()

    def set(self, key: str, value: str, /) -> None:
        if json.loads(value)[0] > 0:
            self.sending.set()
            assert self.gate.wait(30)
        self[key] = value

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return [self[key].encode() for key in keys]

    def check(self, keys: list[str], /) -> bool:
        return self.keys() >= set(keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self.setdefault(key, desired).encode()

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Does nothing."""


def test_the_last_heartbeat_of_a_rank_that_leaves_says_that_it_has_left():
    """Otherwise the others would report it as lost: a heartbeat may be in progress in its own thread."""
    store = SlowStore()
    watch = RankWatch(0, 1, store)
    watch.start()
    assert store.sending.wait(30)
    stopping = threading.Thread(target=watch.stop)
    stopping.start()
    stopping.join(0.1)
    assert stopping.is_alive(), "it waits for the heartbeat"
    store.gate.set()
    stopping.join(30)
    assert json.loads(store["heartbeat0"])[0] == LEFT


def test_an_interrupted_rank_ends_normally_even_if_another_has_already_ended(monkeypatch: pytest.MonkeyPatch):
    def fail(world: World) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")

    monkeypatch.setattr(World, "wait_for_all", fail)
    with pytest.raises(Interrupted), process_group(World(), torch.device("cpu")):
        raise Interrupted.by("SIGTERM")


def test_a_process_with_another_start_time_is_not_killed():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    start_ticks = process_start_ticks(pid)
    assert start_ticks is not None
    assert not kill_process(pid, start_ticks + 1)
    assert kill_process(pid, start_ticks)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
