"""Signals set flags or end the block, in the main thread, while a training runs."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from flatout.errors import Interrupted
from flatout.ranks.signals import STOP_SIGNALS, Interrupts, StopSignals
from tests.feed.injections import wait_until

ROOT = Path(__file__).parents[2]
TWICE = """
import os, signal, time
from flatout.ranks.signals import Interrupts
with Interrupts() as interrupts:
    os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.requested == "SIGINT"
    {again}
    time.sleep(0.01)
    print("still here", interrupts.requested, flush=True)
"""


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_requests_the_end_and_nothing_else_happens(number: signal.Signals):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert interrupts.requested is None
        send(number)
        assert interrupts.requested == number.name
        assert not interrupts.save_requested
    assert signal.getsignal(number) == before


def test_the_first_signal_is_the_one_that_is_reported():
    with Interrupts() as interrupts:
        send(signal.SIGTERM)
        send(signal.SIGHUP)
        assert interrupts.requested == "SIGTERM"


def test_sigusr1_requests_a_save_each_time():
    with Interrupts() as interrupts:
        for _ in range(2):
            send(signal.SIGUSR1)
            assert interrupts.take_save_request()
            assert not interrupts.take_save_request()
        assert interrupts.requested is None


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_an_ignored_signal_stays_ignored(number: signal.Signals):
    """F14: nohup ignores SIGHUP, a shell ignores SIGINT for its background jobs."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            send(number)
            assert interrupts.requested is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_handlers_are_restored_when_the_block_ends_with_an_error():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError), Interrupts():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


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


def test_ctrl_c_twice_ends_immediately():
    """F02."""
    outcome = run("os.kill(os.getpid(), signal.SIGINT)")
    assert outcome.returncode == 130
    assert outcome.stdout == ""
    assert outcome.stderr.strip() == (
        "flatout: stopped immediately; everything saved so far is kept. Run the same command again."
    )


def test_sigterm_after_ctrl_c_does_not(tmp_path: Path):
    outcome = run("os.kill(os.getpid(), signal.SIGTERM)")
    assert outcome.returncode == 0
    assert outcome.stdout.strip() == "still here SIGINT"


def test_a_ctrl_c_between_two_trainings_is_passed_on_once(monkeypatch: pytest.MonkeyPatch):
    """If it were passed on twice, the loop would end before it has saved."""
    monkeypatch.setattr("flatout.ranks.signals.stop_at_once", lambda: pytest.fail("the second Ctrl-C"))
    with StopSignals():
        # Like C code that calls Python and ignores the exception.
        with suppress(KeyboardInterrupt):
            send(signal.SIGINT)
        with Interrupts() as interrupts:
            assert interrupts.requested == "SIGINT"


def stop(error: type[Exception] | None = None) -> None:
    with StopSignals():
        try:
            send(signal.SIGTERM)
        finally:
            if error is not None:
                raise error("initialization failed")


@pytest.mark.parametrize("error", [None, ImportError])
def test_a_signal_where_nothing_is_unsaved_ends_the_block(error: type[Exception] | None):
    """Also if an import in C has turned the exception into an error of its own."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(Interrupted, match=r"^SIGTERM: stopped before the first step; nothing is lost\. Run the same"):
        stop(error)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_second_signal_soon_after_does_not_interrupt_the_cleanup():
    cleaned = []

    def stop_twice() -> None:
        with StopSignals():
            try:
                send(signal.SIGTERM)
            finally:
                send(signal.SIGTERM)
                cleaned.append(True)

    with pytest.raises(Interrupted):
        stop_twice()
    assert cleaned


def test_in_a_loop_without_unsaved_steps_a_signal_does_not_wait_for_the_step():
    def train_a_step() -> None:
        with Interrupts() as interrupts:
            interrupts.nothing_unsaved = True
            send(signal.SIGTERM)
            pytest.fail("the step went on")

    with pytest.raises(Interrupted, match="SIGTERM: everything is saved"):
        train_a_step()


def test_importing_flatout_touches_no_signal():
    code = """
import signal
before = [signal.getsignal(number) for number in signal.valid_signals()]
import flatout, flatout.__main__, flatout.ranks.signals, flatout.yolo, flatout.defect, flatout.spike
from flatout.yolo import train
assert [signal.getsignal(number) for number in signal.valid_signals()] == before
assert signal.set_wakeup_fd(-1) == -1
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# Commands, as processes. They are signalled once the kernel reports a handler, not after a fixed time.

COMMANDS = {
    "train.py": ["train.py", "--data", "nowhere.yaml"],
    "train_aux.py": ["train_aux.py", "--data", "nowhere.yaml"],
    "yolo stages": ["-m", "flatout", "yolo", "stages", "nowhere.yaml"],
    "defect": ["-m", "flatout", "--debug", "defect", "train", "--training_dataset_path", "nowhere"],
    "spike": ["-m", "flatout", "spike", "train", "--config", "nowhere.yaml"],
}
NOTHING_LOST = "flatout: {}: stopped before the first step; nothing is lost. Run the same command again.\n"


def start(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def has_handler(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def has_mapped(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_training_command_handles_signals_before_it_imports_torch(words: list[str]):
    process = start(*words)
    wait_until(lambda: has_handler(process.pid), 10)
    assert not has_mapped(process.pid, "libtorch")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=5)
    assert (process.returncode, output) == (75, NOTHING_LOST.format("SIGTERM"))


def test_ctrl_c_while_torch_is_imported_is_answered():
    # With --on-done, data is checked after torch is imported.
    process = start(*COMMANDS["train.py"], "--on-done", "true")
    wait_until(lambda: has_mapped(process.pid, "libtorch_cpu"), 30)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=5)
    assert (process.returncode, output) == (75, NOTHING_LOST.format("SIGINT"))


IN_C = """
import hashlib
from flatout.ranks import signals as interrupts
from flatout.ranks.signals import Interrupts, ForwardedSignals, StopSignals, watched
assert interrupts.ANSWER_S < 4, "answered within 5 s"
interrupts.ANSWER_S = 0.3
with watched(), {block} as block:
    block.nothing_unsaved = {nothing_unsaved}
    print("computing", flush=True)
    # Like a long step of torch: C code that does not run Python's signal handlers.
    hashlib.pbkdf2_hmac("sha256", b"step", b"", 10**9)
"""


def start_computing(block: str, *, nothing_unsaved: bool) -> "subprocess.Popen[str]":
    process = start("-c", IN_C.format(block=block, nothing_unsaved=nothing_unsaved))
    assert process.stdout is not None
    assert process.stdout.readline() == "computing\n"
    began = cpu_ticks(process.pid)
    wait_until(lambda: cpu_ticks(process.pid) > began + 5, 10)
    return process


def cpu_ticks(pid: int) -> int:
    """CPU time of a process, in hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.parametrize("block", ["StopSignals()", "Interrupts()"])
def test_a_signal_is_answered_while_c_code_computes(block: str):
    process = start_computing(block, nothing_unsaved=True)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=5)
    assert (process.returncode, output) == (75, NOTHING_LOST.format("SIGTERM"))


def test_a_user_who_has_to_wait_for_a_long_step_is_told_so_and_can_end_it():
    """By Ctrl-C a second time."""
    process = start_computing("Interrupts()", nothing_unsaved=False)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "flatout: SIGINT: finishing the current step, then saving.\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=5)
    assert (process.returncode, output.startswith("flatout: stopped immediately")) == (130, True)


def test_a_process_that_forwards_signals_waits_for_those_it_forwards_them_to():
    waiting = (
        IN_C.partition("    block.nothing")[0]
        + """
    import time
    print("waiting", flush=True)
    time.sleep(1.5)
    print("done", flush=True)
"""
    )
    process = start("-c", waiting.format(block="ForwardedSignals(print)"))
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=5)
    assert (process.returncode, output) == (0, "15\ndone\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_interpreter_shuts_down_does_not_change_the_exit_code(number: signal.Signals):
    """Unloading torch takes a second: a supervisor must not mistake a finished training for a killed one."""
    late = f"""
import atexit, os, sys
from flatout.ranks.signals import watched
atexit.register(os.kill, os.getpid(), {int(number)})
with watched():
    pass
sys.exit(3)
"""
    process = start("-c", late)
    output, _ = process.communicate(timeout=10)
    assert (process.returncode, output) == (3, "")
