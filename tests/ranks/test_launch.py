"""One process per GPU without a launcher: exit code of the cause, signals to every rank, no rank left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.__main__ import main
from flatout.ranks.launch import environ_of, exit_code_of
from tests.feed.injections import CHECKOUT, is_gone, wait_until

# Ranks that only wait; they replace `flatout`.
RANK = """
import os, signal, sys, time
folder, words = sys.argv[1], sys.argv[2:]
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
open(f"{folder}/{rank}", "w").write(str(os.getpid()))
while not all(os.path.exists(f"{folder}/{each}") for each in "01"):
    time.sleep(0.01)  # otherwise the first might end, and the other with it, before that has started
if words and words[int(rank)] != "wait":
    sys.exit(int(words[int(rank)]))
time.sleep(60)
"""
LAUNCH = """
import sys
from flatout.ranks import launch as launch_ranks
launch_ranks.sys.executable = sys.executable
real = launch_ranks.subprocess.Popen
launch_ranks.subprocess.Popen = lambda command, **options: real([sys.executable, "-c", RANK, *command[3:]], **options)
sys.exit(launch_ranks.launch_ranks(sys.argv[1:], 2, grace_s=0.5))
"""


def launch(folder: Path, *codes: str) -> "subprocess.Popen[bytes]":
    """Start two ranks that end with these codes, or wait."""
    program = f"RANK = {RANK!r}\n{LAUNCH}"
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen([sys.executable, "-c", program, str(folder), *codes], env=environ)


def pids_in(folder: Path) -> list[int]:
    wait_until(lambda: all((folder / name).exists() and (folder / name).read_text() for name in "01"), 60)
    return [int((folder / name).read_text()) for name in "01"]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    launched = launch(tmp_path, "wait", "3")
    assert launched.wait(60) == 3
    assert all(map(is_gone, pids_in(tmp_path)))


def test_a_signal_goes_to_every_rank_and_their_exit_code_is_returned(tmp_path: Path) -> None:
    launched = launch(tmp_path, "wait", "wait")
    pids = pids_in(tmp_path)
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(60) == 75
    assert all(map(is_gone, pids))


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    launched = launch(tmp_path, "wait", "wait")
    pids = pids_in(tmp_path)
    launched.kill()
    launched.wait()
    wait_until(lambda: all(map(is_gone, pids)), 30)


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([7, 3], 3), ([-9, 7], 7), ([75, 75], 75), ([0, 7], 7), ([0, -11], 7)]
)
def test_the_exit_code_is_that_of_the_cause(codes: list[int], code: int) -> None:
    assert exit_code_of(codes) == code


def test_ranks_get_the_variables_of_torchrun() -> None:
    environ = environ_of(1, 2, 4711, {"HOME": "/root", "OMP_NUM_THREADS": "3"})
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}
    assert expected.items() <= environ.items()
    assert environ["HOME"] == "/root" and environ["OMP_NUM_THREADS"] == "3", "existing variables are kept"


@pytest.mark.parametrize(
    ("job", "more"),
    [
        ("yolo", ["--data", "my.yaml"]),
        ("defect", ["--training_dataset_path", "R"]),
        ("spike", ["--config", "my.yaml"]),
    ],
)
def test_several_gpus_become_several_processes(job: str, more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[list[str], int]] = []

    def note(words: list[str], count: int) -> int:
        launched.append((words, count))
        return 75

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("flatout.ranks.launch.launch_ranks", note)
    monkeypatch.setattr(
        "flatout.yolo.commands.train.YoloCommand.check_early", lambda self, options: None
    )  # there is no data
    words = [job, "train", "--device", "0,2,3", *more]
    assert main(words) == 75
    assert launched == [(words, 3)]
    assert main([job, "train", "--device", "0,4", *more]) == 5, "there is no such GPU"


@pytest.mark.parametrize(
    ("job", "options_file"), [("yolo", "opt.yaml"), ("defect", "config.yaml"), ("spike", "options.yaml")]
)
def test_a_resumed_run_is_started_on_its_own_gpus_unless_the_command_gives_others(
    job: str, options_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def note(words: list[str], count: int) -> int:
        launched.append(count)
        return 0

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("flatout.ranks.launch.launch_ranks", note)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / options_file).write_text('device: "0,2,3"\n')
    monkeypatch.setattr("flatout.runs.command.TrainCommand.run_training", lambda *args: launched.append(1))
    for more in ([], ["--device", "1,2"], ["--device", "0"]):
        assert main([job, "train", "--resume", str(tmp_path), *more]) == 0
    assert launched == [3, 2, 1]
