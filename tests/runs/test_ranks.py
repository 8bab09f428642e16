"""G6, F29, F32: several ranks see what one would see, may become more or fewer, and end together when one is lost."""

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
from tests.runs.toy_ranks import run_ranks, samples_of, seen_by, start_ranks
from tests.runs.toy_runs import ToyRun, Toys

LOUD = {"TOY_LOG": "DEBUG"}
SLOWLY = ("--delay-ms", 50)
LOST_AFTER_S = 4
"""Eight beats: less patience would be tried by a machine with much else to do."""


def test_two_ranks_see_together_what_one_sees_alone(toys: Toys, tmp_path: Path):
    """G6: the same samples in every step, and the same weights on both ranks; not the same bits as alone."""
    alone = samples_of(toys.run(tmp_path / "alone", "--epochs", 2, env=LOUD).said)
    runs = run_ranks(toys, tmp_path / "together", "--epochs", 2)
    assert seen_by(runs) == alone
    assert len({re.search(r"^weights \w+$", run.said, re.MULTILINE)[0] for run in runs}) == 1  # type: ignore[index]


def test_ranks_that_do_not_share_the_samples_are_found_out(toys: Toys, tmp_path: Path):
    """Negative control of G6."""
    alone = samples_of(toys.run(tmp_path / "alone", "--epochs", 1, env=LOUD).said)
    seen = seen_by(run_ranks(toys, tmp_path / "together", "--epochs", 1, "--unshared"))
    assert seen.keys() == alone.keys()
    assert all(seen[place] != alone[place] for place in alone)


def test_a_run_goes_on_with_more_ranks_and_with_fewer(toys: Toys, tmp_path: Path):
    """G6, F32: 1 -> 2 -> 1 rank; every step shows what it would have shown."""
    whole = samples_of(toys.run(tmp_path / "whole", env=LOUD).said)
    first = toys.run(tmp_path / "parts", env=LOUD | {"FLATOUT_STOP_AFTER": "12"})
    second = run_ranks(toys, tmp_path / "parts", env={"FLATOUT_STOP_AFTER": "10"})
    third = toys.run(tmp_path / "parts", env=LOUD)
    assert "world_size 1 -> 2: samples and their order per step stay the same" in second[0].said
    assert "world_size 2 -> 1" in third.said
    assert third.code == 0, third.said
    assert samples_of(first.said) | seen_by(second) | samples_of(third.said) == whole
    assert len(rows_of(tmp_path / "parts/toy/log.jsonl")) == 4


# F29: one of two ranks is lost.


def ended_together(runs: list[ToyRun]) -> None:
    """Within the minute that is promised."""
    end_s = time.monotonic() + 60
    for run in runs:
        run.wait(end_s - time.monotonic())


def last_word(run: ToyRun) -> str:
    """What flatout said at the end; torch may say something at any time."""
    return re.findall(r"^flatout: .*$", run.said, re.MULTILINE)[-1]


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
    assert (runs[lost].code, survivor.code) == (-signal.SIGKILL, 7), survivor.said
    told = rf"flatout: no sign of life from rank {lost} \(.+\): .* Run the same command again\."
    assert re.fullmatch(told, last_word(survivor)), survivor.said
    checkpoint_is_sound(tmp_path)


@pytest.mark.fault
@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_one_rank_is_told_to_the_others_with_its_traceback(failing: int, toys: Toys, tmp_path: Path):
    """Also that of the first, with which the store goes through which it is told."""
    runs = start_ranks(toys, tmp_path, "--save-every-steps", 2, each={failing: ("--no-memory", "2:3")})
    ended_together(runs)
    other = runs[1 - failing]
    assert (runs[failing].code, other.code) == (5, 7), other.said
    assert f"Rank {failing} (" in other.said and "torch.OutOfMemoryError: CUDA out of memory" in other.said
    told = f"flatout: rank {failing} failed, so all end: ResourceError: out of GPU memory"
    assert last_word(other).startswith(told), other.said
    checkpoint_is_sound(tmp_path)


def test_all_ranks_end_within_a_minute_by_default():
    """F29, whose tests above are less patient: noticed, then the launcher's half minute for whoever still lives."""
    torchrun_waits_s = 30
    assert LOST_AFTER_S_BY_DEFAULT + max(GRACE_S, torchrun_waits_s) < 60


# Who is silent: without processes.


def test_a_rank_is_lost_when_it_is_silent_for_too_long_unless_it_has_left():
    pulses = Heartbeats(3, now_s=0.0)
    for second in range(1, 12):
        pulses.hear([second, min(second, 4), LEFT], float(second))
        lost = pulses.silent(float(second), limit_s=5)
        assert lost == ([1] if second > 9 else []), second


def test_whoever_was_stopped_himself_blames_nobody():
    """Ctrl-Z stops all ranks at once; after `fg` they go on."""
    pulses = Heartbeats(2, now_s=0.0)
    pulses.hear([1, 1], 1.0)
    assert pulses.silent(1.0, limit_s=5) == []
    assert pulses.silent(1000.0, limit_s=5) == []
    assert pulses.silent(1000.0 + PERIOD_S, limit_s=5) == []
    pulses.hear([2, 1], 1004.0)
    assert pulses.silent(1004.0, limit_s=3.9) == [1], "but later it may"


class SlowStore(dict[str, str]):
    """A store in which a beat takes until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.beating, self.gate = threading.Event(), threading.Event()

    def set(self, key: str, value: str, /) -> None:
        if json.loads(value)[0] > 0:
            self.beating.set()
            assert self.gate.wait(30)
        self[key] = value

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return [self[key].encode() for key in keys]

    def check(self, keys: list[str], /) -> bool:
        return self.keys() >= set(keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self.setdefault(key, desired).encode()

    def set_timeout(self, timeout: timedelta, /) -> None:
        """It has none."""


def test_the_last_word_of_a_rank_that_leaves_is_that_it_has_left():
    """Else the others would miss it, and end: a beat may be under way in its own thread."""
    store = SlowStore()
    watch = RankWatch(0, 1, store)
    watch.start()
    assert store.beating.wait(30)
    stopping = threading.Thread(target=watch.stop)
    stopping.start()
    stopping.join(0.1)
    assert stopping.is_alive(), "it waits for the beat"
    store.gate.set()
    stopping.join(30)
    assert json.loads(store["beat0"])[0] == LEFT


def test_a_rank_that_was_asked_to_end_does_so_even_if_another_is_gone_already(monkeypatch: pytest.MonkeyPatch):
    def fail(world: World) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")

    monkeypatch.setattr(World, "wait_for_all", fail)
    with pytest.raises(Interrupted), process_group(World(), torch.device("cpu")):
        raise Interrupted.by("SIGTERM")


def test_only_the_process_that_was_meant_is_killed():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    born = process_start_ticks(pid)
    assert born is not None
    assert not kill_process(pid, born + 1)
    assert kill_process(pid, born)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
