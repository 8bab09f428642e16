"""G6, F29, F32: several ranks see what one would see, may become more or fewer, and end together when one is lost."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from flatout.engine.checkpoint.container import read_container
from flatout.engine.pulses import LEFT, PERIOD_S, Pulses
from flatout.engine.rank_watch import GRACE_S
from flatout.engine.rank_watch import LOST_AFTER_S as LOST_AFTER_S_BY_DEFAULT
from flatout.engine.siblings import born_ticks, kill_sibling
from tests.engine.toy_ranks import run_ranks, samples_of, seen_by, start_ranks
from tests.engine.toy_runs import ToyRun, Toys

LOUD = {"TOY_LOG": "DEBUG"}
SLOWLY = ("--delay-ms", 50)
LOST_AFTER_S = 2.5


def test_two_ranks_see_together_what_one_sees_alone(toys: Toys, tmp_path: Path):
    """G6: the same samples in every step, and the same weights on both ranks; not the same bits as alone."""
    alone = samples_of(toys.run(tmp_path / "alone", "--epochs", 2, env=LOUD).said)
    runs = run_ranks(toys, tmp_path / "together", "--epochs", 2)
    assert seen_by(runs) == alone
    assert len({re.search(r"^weights \w+$", run.said, re.MULTILINE)[0] for run in runs}) == 1  # type: ignore[index]


def test_a_run_goes_on_with_more_ranks_and_with_fewer(toys: Toys, tmp_path: Path):
    """G6, F32: 1 -> 2 -> 1 rank; every step shows what it would have shown."""
    whole = samples_of(toys.run(tmp_path / "whole", env=LOUD).said)
    first = toys.run(tmp_path / "parts", "--stop-after", 12, env=LOUD)
    second = run_ranks(toys, tmp_path / "parts", "--stop-after", 10)
    third = toys.run(tmp_path / "parts", env=LOUD)
    assert "world_size 1 -> 2: samples and their order per step stay the same" in second[0].said
    assert "world_size 2 -> 1" in third.said
    assert third.code == 0, third.said
    assert samples_of(first.said) | seen_by(second) | samples_of(third.said) == whole
    assert len((tmp_path / "parts/toy/results.txt").read_text().splitlines()) == 4


# F29: one of two ranks is lost.


def ended_together(runs: list[ToyRun], within_s: float) -> None:
    end_s = time.monotonic() + within_s
    for run in runs:
        run.wait(end_s - time.monotonic())


def checkpoint_is_sound(project: Path) -> None:
    assert "training" in read_container(project / "toy/weights/last.pt")


@pytest.mark.fault
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_when_a_rank_is_killed_or_stopped_the_others_end_and_say_so(
    number: signal.Signals, lost: int, toys: Toys, tmp_path: Path
):
    runs = start_ranks(toys, tmp_path, "--epochs", 20, "--save-every-steps", 2, "--lost-after-s", LOST_AFTER_S, *SLOWLY)
    runs[0].wait_for_words("epoch 1 step 6")
    runs[lost].send(number)
    ended_together(runs, within_s=30)
    survivor = runs[1 - lost]
    assert (runs[lost].code, survivor.code) == (-signal.SIGKILL, 7), survivor.said
    last = survivor.said.splitlines()[-1]
    assert re.fullmatch(rf"flatout: no sign of life from rank {lost} \(.+\): .* Run the same command again\.", last)
    checkpoint_is_sound(tmp_path)


@pytest.mark.fault
def test_the_error_of_one_rank_is_told_to_the_others_with_its_traceback(toys: Toys, tmp_path: Path):
    runs = start_ranks(toys, tmp_path, "--save-every-steps", 2, each={1: ("--no-memory", "2:3")})
    ended_together(runs, within_s=30)
    assert (runs[0].code, runs[1].code) == (7, 5), runs[0].said
    assert "Rank 1 (" in runs[0].said and "torch.OutOfMemoryError: CUDA out of memory" in runs[0].said
    last = runs[0].said.splitlines()[-1]
    assert last.startswith("flatout: rank 1 failed, so all end: ResourceError: out of GPU memory"), runs[0].said
    checkpoint_is_sound(tmp_path)


def test_all_ranks_end_within_a_minute_by_default():
    """F29, whose tests above are less patient: noticed, then the launcher's half minute for whoever still lives."""
    torchrun_waits_s = 30
    assert LOST_AFTER_S_BY_DEFAULT + max(GRACE_S, torchrun_waits_s) < 60


# Who is silent: without processes.


def test_a_rank_is_lost_when_it_is_silent_for_too_long_unless_it_has_left():
    pulses = Pulses(3, now_s=0.0)
    for second in range(1, 12):
        pulses.hear([second, min(second, 4), LEFT], float(second))
        lost = pulses.silent(float(second), limit_s=5)
        assert lost == ([1] if second > 9 else []), second


def test_whoever_was_stopped_himself_blames_nobody():
    """Ctrl-Z stops all ranks at once; after `fg` they go on."""
    pulses = Pulses(2, now_s=0.0)
    pulses.hear([1, 1], 1.0)
    assert pulses.silent(1.0, limit_s=5) == []
    assert pulses.silent(1000.0, limit_s=5) == []
    assert pulses.silent(1000.0 + PERIOD_S, limit_s=5) == []
    pulses.hear([2, 1], 1004.0)
    assert pulses.silent(1004.0, limit_s=3.9) == [1], "but later it may"


def test_only_the_process_that_was_meant_is_killed():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    born = born_ticks(pid)
    assert born is not None
    assert not kill_sibling(pid, born + 1)
    assert kill_sibling(pid, born)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
