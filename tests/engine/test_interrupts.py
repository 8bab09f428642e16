"""Signals become wishes, in the main thread, for as long as a training runs."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from flatout.engine.heard_between import HeardBetween
from flatout.engine.interrupts import ENDING, Interrupts
from flatout.engine.job import Tick

ROOT = Path(__file__).parents[2]
TWICE = """
import os, signal, time
from flatout.engine.interrupts import Interrupts
with Interrupts() as interrupts:
    os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.requested == "SIGINT"
    {again}
    time.sleep(0.01)
    print("still here", interrupts.requested, flush=True)
"""


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_asks_for_the_end_and_nothing_else_happens(number: signal.Signals):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert interrupts.requested is None
        send(number)
        assert interrupts.requested == number.name
        assert not interrupts.save_requested
    assert signal.getsignal(number) == before


def test_the_first_signal_is_the_one_that_is_told():
    with Interrupts() as interrupts:
        send(signal.SIGTERM)
        send(signal.SIGHUP)
        assert interrupts.requested == "SIGTERM"


def test_sigusr1_asks_for_a_save_each_time():
    with Interrupts() as interrupts:
        for _ in range(2):
            send(signal.SIGUSR1)
            assert interrupts.take_save_request()
            assert not interrupts.take_save_request()
        assert interrupts.requested is None


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_what_was_ignored_stays_ignored(number: signal.Signals):
    """F14: nohup ignores SIGHUP, a shell ignores SIGINT for its background jobs."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            send(number)
            assert interrupts.requested is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_handlers_come_back_when_the_block_ends_by_an_error():
    before = [signal.getsignal(number) for number in ENDING]
    with pytest.raises(ZeroDivisionError), Interrupts():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in ENDING] == before


def test_in_another_thread_nothing_is_touched():
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:
        with Interrupts() as interrupts:
            seen.extend([signal.getsignal(signal.SIGTERM), interrupts.requested])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, None]


def run(again: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", TWICE.format(again=again)], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_ctrl_c_twice_ends_at_once():
    """F02."""
    outcome = run("os.kill(os.getpid(), signal.SIGINT)")
    assert outcome.returncode == 130
    assert outcome.stdout == ""
    assert outcome.stderr.strip() == (
        "flatout: stopped at once; what was saved is untouched. Run the same command again."
    )


def test_sigterm_after_ctrl_c_does_not(tmp_path: Path):
    outcome = run("os.kill(os.getpid(), signal.SIGTERM)")
    assert outcome.returncode == 0
    assert outcome.stdout.strip() == "still here SIGINT"


def test_a_ctrl_c_between_two_trainings_is_passed_on_once(monkeypatch: pytest.MonkeyPatch):
    """Twice, and the loop would end before it has saved."""
    monkeypatch.setattr("flatout.engine.interrupts.stop_at_once", lambda: pytest.fail("the second Ctrl-C"))
    with HeardBetween() as between:
        # As C code does that calls Python and goes on whatever comes back.
        with suppress(KeyboardInterrupt):
            send(signal.SIGINT)
        with Interrupts() as heard:
            for _ in range(3):
                between.log(cast(Tick, None))
            assert heard.requested == "SIGINT"
