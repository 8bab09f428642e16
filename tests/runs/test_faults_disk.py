"""F15-F19, F23: disks that are full, damaged, read-only or failing. Real file systems and real errors of the kernel."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flatout.safefiles.container import read_container
from tests.runs.comparing_states import differences_between
from tests.runs.toy_runs import Toys

pytestmark = pytest.mark.fault

KIB = 1024
ONE_STATE_KIB, TWO_STATES_KIB = 112, 180
"""Sizes of disks with space for one or two checkpoints of the toy: 44 KiB each in whole pages, 72 while one is written,
and 48 for all other files."""


@contextmanager
def small_disk(folder: Path, size_kib: int) -> Iterator[Path]:
    """A separate file system of this size, mounted at `folder`."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(*words: str) -> None:
    outcome = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if outcome.returncode:
        pytest.skip(f"nothing can be mounted here: {outcome.stderr.strip()}")


@pytest.fixture
def interrupted(toys: Toys, tmp_path: Path) -> Path:
    """The folder of a training that was interrupted in its third epoch."""
    run = toys.run(tmp_path / "runs", "--signal-at", "2:5:SIGTERM")
    assert run.code == 75, run.output
    return tmp_path / "runs/toy"


# Full


def test_a_disk_with_space_for_one_checkpoint_ends_the_training_and_keeps_it(toys: Toys, tmp_path: Path):
    """F15."""
    with small_disk(tmp_path / "disk", ONE_STATE_KIB) as disk:
        run = toys.run(disk)
        assert run.code == 5, run.output
        last = run.output.splitlines()[-1]
        assert last.startswith(f"flatout: {disk}/toy/weights/last.pt: not enough disk space: ")
        assert "bytes needed" in last
        assert " free. The existing file is unchanged. Free some space or choose another folder." in last
        assert "Trying again." in run.output
        saved: dict = read_container(disk / "toy/weights/last.pt")["training"]  # type: ignore[assignment]
        assert saved["position"]["epoch"] == 0
        _mount("-o", "remount,size=1m", str(disk))
        assert toys.run(disk).code == 0


def test_a_disk_with_space_for_two_checkpoints_is_large_enough(toys: Toys, undisturbed: Path, tmp_path: Path):
    """F15: the older checkpoint makes room for the newest one."""
    with small_disk(tmp_path / "disk", TWO_STATES_KIB) as disk:
        run = toys.run(disk)
        assert run.code == 0, run.output
        assert "not enough disk space" in run.output
        assert differences_between(undisturbed, disk / "toy") == []


@pytest.mark.parametrize("name", ["results.csv", "log.jsonl"])
def test_a_full_disk_for_logs_does_not_stop_the_training(name: str, toys: Toys, undisturbed: Path, tmp_path: Path):
    """F16."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / name).symlink_to("/dev/full")
    run = toys.run(tmp_path, "--exist-ok")
    assert run.code == 0, run.output
    assert run.output.count(f"{name}: cannot be written: No space left on device. Training goes on without it") == 1
    (tmp_path / "toy" / name).unlink()
    shutil.copy(undisturbed / name, tmp_path / "toy" / name)
    differing = differences_between(undisturbed, tmp_path / "toy")
    assert all(key.startswith("training.job.records.bytes") for key in differing)


# Damaged


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_newest_checkpoint_costs_steps_which_are_reported(
    damage: Callable[[Path], None], toys: Toys, undisturbed: Path, interrupted: Path
):
    """F17; every offset is tried in test_checkpoints.py."""
    damage(interrupted / "weights/last.pt")
    run = toys.run(interrupted.parent)
    assert run.code == 0, run.output
    assert "weights/last.pt: is " in run.output
    assert "Continuing from" in run.output
    assert "steps are lost (epoch 2 step 6 -> epoch 2 step 4)" in run.output
    assert differences_between(undisturbed, interrupted) == []


def test_if_every_checkpoint_is_damaged_the_training_does_not_start_over(toys: Toys, interrupted: Path):
    """F18."""
    for path in interrupted.glob("weights/last*.pt"):
        cut(path)
    before = {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file() and path.name != ".lock"}
    run = toys.run(interrupted.parent)
    assert run.code == 4
    last = run.output.splitlines()[-1]
    assert last.startswith(f"flatout: {interrupted}/weights: no checkpoint can be read, so nothing was started.")
    assert last.endswith("start over with --fresh.")
    assert {path: path.read_bytes() for path in before} == before


# Read-only


def test_a_folder_that_cannot_be_written_is_refused_with_advice(toys: Toys, tmp_path: Path):
    """F19."""
    with small_disk(tmp_path / "disk", 64) as disk:
        _mount("-o", "remount,ro", str(disk))
        run = toys.run(disk / "runs")
        assert run.code == 5, run.output
        assert run.output.splitlines()[-1].startswith(
            f"flatout: {disk}/runs/toy: cannot be created: Read-only file system."
        )
        assert run.output.rstrip().endswith("Choose another folder with --project.")


def test_data_on_a_read_only_disk_can_be_used(toys: Toys, tmp_path: Path):
    """F19."""
    with small_disk(tmp_path / "disk", 64) as disk:
        (disk / "labels.txt").write_text("0 1 2 3")
        _mount("-o", "remount,ro", str(disk))
        assert toys.run(tmp_path / "runs", "--labels", disk / "labels.txt").code == 0


# Failing system calls


@pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: no system call can be made to fail"
)
@pytest.mark.parametrize("calls", ["fsync:error=EIO", "rename,renameat,renameat2:error=EXDEV"])
def test_a_failing_system_call_is_a_failed_save(calls: str, toys: Toys, undisturbed: Path, tmp_path: Path):
    """F23."""
    run = toys.start(tmp_path, "--delay-ms", 30, "--save-every-steps", 6)
    newest = tmp_path / "toy/weights/last.pt"
    while not newest.exists():
        assert not run.has_ended(), run.output
        time.sleep(0.005)
    tracing = ["strace", "-f", "-q", "-p", str(run.pid), "-o", os.devnull, "-e", f"inject={calls}"]
    with subprocess.Popen(tracing, stderr=subprocess.DEVNULL):
        assert run.wait() == 5, run.output
    last = run.output.splitlines()[-1]
    assert last.startswith(f"flatout: {newest}: cannot be written: ")
    assert last.endswith("Check the folder and its permissions.")
    read_container(newest)
    assert toys.run(tmp_path).code == 0
    assert differences_between(undisturbed, tmp_path / "toy") == []
