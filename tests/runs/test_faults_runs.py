"""F11, F12, F24, F32 and G7, G12: which run a command continues, and its message if it cannot."""

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runs.comparing_states import differences_between, rows_of, state_of
from tests.runs.toy_runs import Toys

pytestmark = pytest.mark.fault

ALL_OF_EPOCH_1 = ",".join(f"1:{step}" for step in range(10))


@pytest.fixture
def interrupted(toys: Toys, tmp_path: Path) -> Path:
    run = toys.run(tmp_path / "runs", "--signal-at", "1:4:SIGTERM")
    assert run.code == 75, run.output
    return tmp_path / "runs/toy"


# The same command, and others (G7).


def test_the_same_command_continues_and_then_starts_the_next_run(toys: Toys, undisturbed: Path, interrupted: Path):
    run = toys.run(interrupted.parent)
    assert f"Continuing {interrupted} at epoch 1, step 6." in run.output
    assert differences_between(undisturbed, interrupted) == []
    again = toys.run(interrupted.parent)
    assert f"Starting {interrupted}2." in again.output
    assert differences_between(undisturbed, interrupted.with_name("toy2")) == []


def test_fresh_starts_a_new_run(toys: Toys, undisturbed: Path, interrupted: Path):
    run = toys.run(interrupted.parent, "--fresh")
    assert f"Starting {interrupted}2." in run.output
    assert differences_between(undisturbed, interrupted.with_name("toy2")) == []


def test_fresh_in_the_same_folder_keeps_only_the_old_checkpoint(toys: Toys, undisturbed: Path, interrupted: Path):
    run = toys.run(interrupted.parent, "--fresh", "--exist-ok")
    assert run.code == 0, run.output
    assert differences_between(undisturbed, interrupted) == []
    assert (interrupted / "weights/last.old.pt").exists()


def test_other_settings_start_another_run_and_the_difference_is_reported(toys: Toys, interrupted: Path):
    run = toys.run(interrupted.parent, "--seed", 5)
    assert run.code == 0
    assert (
        f"{interrupted} is unfinished, but its settings differ: seed 1 -> 5. To continue it, use --resume" in run.output
    )
    refused = toys.run(interrupted.parent, "--seed", 5, "--exist-ok")
    assert refused.code == 2
    assert "holds an unfinished run with other settings: seed 1 -> 5." in refused.output


def test_more_epochs_continue_the_run(toys: Toys, interrupted: Path):
    run = toys.run(interrupted.parent, "--epochs", 5)
    assert run.code == 0, run.output
    assert "epochs 4 -> 5. From here on, the schedule is that of the new length." in run.output
    assert len(rows_of(interrupted / "log.jsonl")) == 5


@pytest.mark.parametrize("path", ["weights/last.pt", "."])
def test_resume_continues_the_run_it_names(path: str, toys: Toys, undisturbed: Path, interrupted: Path):
    run = toys.run(interrupted.parent / "elsewhere", "--resume", interrupted / path)
    assert run.code == 0, run.output
    assert differences_between(undisturbed, interrupted) == []


# Two at a time (F12).


def test_a_second_training_in_one_folder_is_refused_immediately(toys: Toys, tmp_path: Path):
    first = toys.start(tmp_path, "--exist-ok", "--delay-ms", 100)
    first.wait_for_words("training")
    began = time.monotonic()
    second = toys.run(tmp_path, "--exist-ok")
    assert time.monotonic() - began < 2
    assert second.code == 2
    assert re.fullmatch(
        rf"flatout: {tmp_path}/toy is in use by process {first.pid} on host {re.escape(socket.gethostname())}, "
        r"started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\. Wait for it, or choose another name with --name\.",
        second.output.splitlines()[-1],
    )
    first.send(signal.SIGKILL)
    first.wait()
    third = toys.run(tmp_path, "--exist-ok")
    assert third.code == 0, third.output
    assert f"process {first.pid} ended without releasing the lock; taking over." in third.output


def test_without_exist_ok_the_second_training_gets_its_own_folder(toys: Toys, tmp_path: Path):
    first = toys.start(tmp_path, "--delay-ms", 100)
    first.wait_for_words("training")
    second = toys.run(tmp_path)
    assert second.code == 0
    assert f"Starting {tmp_path}/toy2." in second.output
    first.send(signal.SIGKILL)
    first.wait()


def test_a_lock_of_another_host_needs_break_lock(toys: Toys, interrupted: Path):
    holder = {"pid": 1, "host": "elsewhere", "started": "2026-01-01 00:00:00"}
    (interrupted / ".lock").write_text(json.dumps(holder))
    refused = toys.run(interrupted.parent, "--exist-ok")
    assert refused.code == 2
    assert "is locked by process 1 on host elsewhere, started 2026-01-01 00:00:00" in refused.output
    assert refused.output.rstrip().endswith("add --break-lock; otherwise choose another name with --name.")
    assert toys.run(interrupted.parent, "--exist-ok", "--break-lock").code == 0


# Another environment (F11, F24, F32).


@pytest.mark.parametrize("jump_s", [86_400, 3600])
def test_a_clock_that_jumps_at_every_step_changes_nothing(jump_s: int, toys: Toys, undisturbed: Path, tmp_path: Path):
    """F11."""
    run = toys.run(tmp_path, "--clock-jump-s", jump_s, "--signal-at", "2:3:SIGTERM")
    assert run.code == 75, run.output
    # As if it had been saved tomorrow.
    for path in (tmp_path / "toy").rglob("*"):
        os.utime(path, (time.time() + jump_s,) * 2)
    assert toys.run(tmp_path, "--clock-jump-s", jump_s).code == 0
    assert differences_between(undisturbed, tmp_path / "toy") == []
    assert f"Starting {tmp_path}/toy2." in toys.run(tmp_path).output


def test_labels_that_changed_are_noticed_though_size_and_time_did_not(toys: Toys, tmp_path: Path):
    """F24."""
    labels = tmp_path / "labels.txt"
    labels.write_text("0 0.5 0.5 0.1 0.1")
    before = labels.stat()
    args = (tmp_path / "runs", "--labels", labels)
    assert toys.run(*args, "--signal-at", "1:4:SIGTERM").code == 75
    labels.write_text("1 0.5 0.5 0.1 0.1")
    os.utime(labels, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused = toys.run(*args)
    assert refused.code == 3
    assert refused.output.rstrip().endswith("or continue with the changed data: --allow-data-change")
    assert toys.run(*args, "--allow-data-change").code == 0


def test_another_environment_is_logged_and_is_not_an_error(toys: Toys, interrupted: Path):
    """F32: other workers, other threads."""
    run = toys.run(interrupted.parent, "--threads", 2, "--workers", 1)
    assert run.code == 0
    assert [line for line in run.output.splitlines() if line.startswith("threads 1 -> 2: ")]


# Every failure is one line with a cause, a place, and what to do (G12).


@pytest.mark.parametrize(
    ("args", "code", "line"),
    [
        (("--resume", "nowhere/last.pt"), 4, r"--resume nowhere/last\.pt: no such file\. Give a run folder or .*"),
        (("--resume", "/proc"), 4, r"/proc: not part of a run .* use --weights\."),
        (("--resume",), 4, r"/.*: no last\*\.pt below this folder\. Name a run: --resume RUN"),
        (("--no-memory", "1:3"), 5, r"out of GPU memory with 12 .* use a batch size of \d+, .*"),
        (
            ("--poison-loss", ALL_OF_EPOCH_1), 6,
            r"Loss, gradients or weights are not finite \(.*\)\. .* or use a smaller learning rate\.",
        ),
        (
            ("--signal-at", "0:3:SIGTERM"), 75,
            r"SIGTERM: saved at epoch 0, step 4\. Run the same command again to continue\.",
        ),
    ],
)  # fmt: skip
def test_every_failure_is_one_line_and_a_documented_code(
    args: tuple[str, ...], code: int, line: str, toys: Toys, tmp_path: Path
):
    run = toys.run(tmp_path, *args, env={"TOY_LOG": "CRITICAL"})
    assert run.code == code, run.output
    assert re.fullmatch(f"flatout: {line}\n", run.output), run.output
    documented = (Path(__file__).parents[2] / "docs/exit-codes.md").read_text()
    assert re.search(rf"^\| {code} \| \w", documented, re.MULTILINE)


def test_with_debug_the_traceback_is_printed_too(toys: Toys, tmp_path: Path):
    run = toys.run(tmp_path, "--no-memory", "0:1", env={"TOY_LOG": "CRITICAL", "FLATOUT_DEBUG": "1"})
    assert "Traceback" in run.output
    assert run.output.splitlines()[-1].startswith("flatout: out of GPU memory")


# The folder is removed.


@pytest.mark.parametrize("at_save", [True, False], ids=["at a save", "at the end of an epoch"])
def test_a_run_folder_that_is_removed_is_created_again_with_the_newest_checkpoint(
    at_save: bool, toys: Toys, undisturbed: Path, tmp_path: Path
):
    run = toys.start(tmp_path, "--delay-ms", 20, "--save-every-steps", 2 if at_save else 1000)
    run.wait_for_words("training")
    shutil.rmtree(tmp_path / "toy")
    assert run.wait() == 5, run.output
    last = run.output.splitlines()[-1]
    assert "toy/weights was removed or moved while the training was running. It was created again" in last
    assert last.endswith("Run the same command again to continue.")
    again = toys.run(tmp_path)
    assert again.code == 0, again.output
    assert f"Continuing {tmp_path}/toy at epoch 0" in again.output
    mine, theirs = state_of(undisturbed), state_of(tmp_path / "toy")
    weights = [key for key in mine if key.startswith("weights.")]
    assert [key for key in weights if not same_value(mine[key], theirs[key])] == []


def same_value(left: object, right: object) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else left == right
